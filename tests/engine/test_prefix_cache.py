"""Prefixes shared between sessions: found by key and ids, copied, and never seen by another key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import BOTH, answer, assert_close, assert_same_bits, fresh, session, text

import openjet_jax as oj
from openjet_jax.prefix_cache import GRAIN, chain, root_of
from pallas_kernels.attention import BLOCK


def sharing(cache: oj.PrefixCache, key: str = "a", architecture: str = "qwen35") -> oj.Session:
    return session(architecture, prefixes=cache, isolation_key=key)


def read(cache: oj.PrefixCache, ids: list[int], key: str = "a") -> oj.Session:
    ours = sharing(cache, key)
    ours.append(ids)
    ours.read()
    return ours


def test_a_prefix_is_stored_where_a_second_text_parts_and_found_by_the_third():
    cache, system = oj.PrefixCache(), text(100)
    texts = [[*system, *text(30, seed=seed)] for seed in (1, 2, 3)]
    first = read(cache, texts[0])
    assert len(cache) == 0 and cache.nbytes == 0
    second = read(cache, texts[1])
    assert len(cache) == 1 and cache.nbytes > 0
    assert second.reuse == oj.Reuse(reused=0, read=130)
    third = sharing(cache)
    assert third.reusable(texts[2]) == GRAIN
    third.append(texts[2])
    assert third.inspect().unread == 130 - GRAIN
    assert third.read() == oj.Reuse(reused=GRAIN, read=130 - GRAIN, shared=GRAIN)
    for ours, ids in zip((first, second, third), texts, strict=True):
        theirs = session()
        theirs.append(ids)
        theirs.read()
        assert_close(ours, theirs)
        assert answer(ours, 8) == answer(theirs, 8)


def test_another_key_another_model_and_another_cache_format_find_nothing():
    cache, ids = oj.PrefixCache(), text(130)
    ours = read(cache, ids)
    ours.publish()
    assert sharing(cache).reusable([*ids, 1]) == 129
    other = sharing(cache, "b")
    assert other.reusable([*ids, 1]) == 0
    other.append([*ids, 1])
    assert other.read() == oj.Reuse(reused=0, read=131)
    assert len(cache) == 1  # nor did the other's text part from the first one's
    roots = {
        root_of(*parts)
        for parts in [("a", "m", "f"), ("b", "m", "f"), ("a", "n", "f"), ("a", "m", "g")]
    }
    assert len(roots) == 4


def test_a_lookup_takes_the_same_steps_whatever_another_key_stored(monkeypatch):
    seen = []
    monkeypatch.setattr("openjet_jax.prefix_cache.chain", lambda *a: seen.append(a) or chain(*a))
    ids, steps = text(130), []
    for stored in (False, True):
        cache = oj.PrefixCache()
        if stored:
            read(cache, ids, "a").publish()
        other = sharing(cache, "b")
        seen.clear()
        other.append(ids)
        other.read()
        steps.append((len(seen), other.reuse, other._memory.conversation.stats.dispatches))
    assert steps[0] == steps[1]


def test_what_a_session_does_next_changes_no_stored_prefix():
    cache, ids = oj.PrefixCache(), text(100)
    ours = read(cache, ids)
    ours.publish()
    (prefix,) = next(iter(cache._entries.values()))
    before = [np.array(block.trunk["k"]) for block in prefix.blocks]
    adopted = sharing(cache)
    adopted.append([*ids[:99], 1, 2, 3])
    answer(adopted)
    adopted.truncate(10)
    adopted.append([5])
    answer(adopted)
    after = [np.array(block.trunk["k"]) for block in prefix.blocks]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    ours.append([7])
    again = sharing(cache)
    again.append(ours.ids)
    for each in (ours, again):
        each.read()
    assert again.reuse.shared == 99
    assert_same_bits(ours, again)


@BOTH
def test_a_published_session_is_taken_up_by_another_bit_for_bit(architecture):
    cache = oj.PrefixCache()
    ours = sharing(cache, architecture=architecture)
    ours.append(text(60))
    answer(ours, 13)
    ours.publish()
    theirs = sharing(cache, architecture=architecture)
    for each in (ours, theirs):
        each.replace([*ours.ids[:73], 1, 2])
        each.read()
    assert theirs.reuse == oj.Reuse(reused=72, read=3, shared=72)
    assert_same_bits(ours, theirs)


def test_a_session_of_its_own_text_prefers_what_it_has():
    cache = oj.PrefixCache()
    ours = read(cache, text(100))
    ours.publish()
    ours.append([1])
    assert ours.read() == oj.Reuse(reused=100, read=1, shared=0)
    ours.truncate(100)
    ours.append([2])
    assert ours.read().shared == 0


def test_the_cache_keeps_within_its_bytes_and_blocks_count_once():
    size = oj.PrefixCache()
    read(size, text(100)).publish()
    cache = oj.PrefixCache(max_bytes=int(3.5 * size.nbytes))
    for seed in range(6):
        read(cache, text(100, seed=seed)).publish()
        assert cache.nbytes <= cache.max_bytes
    assert len(cache) == 3 and cache.nbytes == 3 * size.nbytes
    found = [sharing(cache).reusable([*text(100, seed=seed), 1]) > 0 for seed in range(6)]
    assert found == [False, False, False, True, True, True]
    tiny = oj.PrefixCache(max_bytes=10)
    read(tiny, text(100)).publish()
    assert len(tiny) == 0 and tiny.nbytes == 0
    with pytest.raises(ValueError, match="max_bytes=-1"):
        oj.PrefixCache(-1)


class Part:
    """Stands for arrays of a known size."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes


@settings(max_examples=60, deadline=None)
@given(
    stored=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=8),
    tails=st.lists(st.integers(1, 100), min_size=8, max_size=8),
    wanted=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    limit=st.integers(0, 400),
)
def test_a_lookup_finds_the_longest_stored_prefix(stored, tails, wanted, limit):
    """Texts are made of pieces of 70 equal ids, so that prefixes part inside grains and blocks."""

    def spell(pieces):
        return [i for piece in pieces for i in [piece] * 70]

    cache, root = oj.PrefixCache(), root_of("key", "model", "float32")
    kept = {
        tuple(spell(pieces)[:-tail] or [0]) for pieces, tail in zip(stored, tails, strict=False)
    }
    for ids in sorted(kept):
        cache.put(root, ids, Part(1), lambda index: Part(1000))  # type: ignore[arg-type]
    ids = spell(wanted)
    fitting = [len(k) for k in kept if len(k) <= limit and list(k) == ids[: len(k)]]
    found = cache.find(root, ids, limit)
    assert (found.position if found else 0) == max(fitting, default=0)
    assert cache.find(root_of("other", "model", "float32"), ids, limit) is None
    assert len(cache) == len(kept)
    blocks = {id(b) for e in cache._entries.values() for p in e for b in p.blocks}
    assert cache.nbytes == len(kept) + 1000 * len(blocks)
    assert all(len(p.blocks) == -(-p.position // BLOCK) for e in cache._entries.values() for p in e)


def test_text_does_not_depend_on_the_cache():
    cache, ids = oj.PrefixCache(), text(120)
    for end in (100, 120, 110):
        ours = read(cache, ids[:end])
        assert answer(ours, 8) == fresh(ids[:end], 8)
