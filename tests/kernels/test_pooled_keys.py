"""Block keys under any windows, accepts, rollbacks and losses; every mutation is caught."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import pooled_keys as ops
from pallas_kernels.block_descriptors import (
    Cells,
    Descriptor,
    changed_blocks,
    is_valid,
    padded_list,
    retained_prefixes,
)
from pallas_kernels.pooled_keys import POSITIONS, UpdateList

CAPACITY, WIDTH, MOST = 128, 4, 16
BLOCKS = CAPACITY // POSITIONS


@dataclasses.dataclass(frozen=True)
class Rules:
    """The maintenance, each rule of it replaceable by a wrong one."""

    update_list: Callable = ops.update_list
    retained_after: Callable = ops.retained_after
    mean_keys: Callable = ops.mean_keys
    write_first: bool = True
    fill: str = "kept"


@functools.cache
def program(rules: Rules, rows: int):
    """Returns a compiled forward: write index keys, pool, and read the keys that rows see."""

    def forward(raw, pooled, retained, start, count, values):
        row = jnp.arange(MOST)
        at = jnp.where(row < count, start + row, CAPACITY)
        written = raw.at[0, at].set(values, mode="drop")
        source = written if rules.write_first else raw
        retained = rules.retained_after(retained, start)
        complete = (start + count) // POSITIONS

        def pool(i, carry):
            pooled, spoilt = carry
            updates = rules.update_list(retained + i * rows, complete, rows, BLOCKS)
            ordered = jnp.sort(updates.destinations)
            spoilt = spoilt | jnp.any(ordered[1:] == ordered[:-1])
            keys = rules.mean_keys(source, 0, updates.blocks)
            return ops.store_keys(pooled, 0, keys, updates, rules.fill == "rewritten"), spoilt

        lists = jnp.maximum((complete - retained + rows - 1) // rows, 1)
        pooled, spoilt = jax.lax.fori_loop(0, lists, pool, (pooled, jnp.bool_(False)))
        return written, pooled, complete, spoilt

    return jax.jit(forward)


def pool_once(raw: np.ndarray, complete: int) -> np.ndarray:
    keys = raw[0, : complete * POSITIONS].reshape(complete, POSITIONS, WIDTH)
    total = ((keys[:, 0] + keys[:, 1]) + keys[:, 2]) + keys[:, 3]
    return total * np.float32(0.25)


def bits(array) -> np.ndarray:
    return np.asarray(array, np.float32).view(np.uint32)


STEPS = st.lists(
    st.tuples(st.integers(1, MOST), st.integers(0, MOST), st.sampled_from(["", "", "clear"])),
    min_size=1,
    max_size=12,
)


def run(rules: Rules, rows: int, script, retention: bool = True, seed: int = 0) -> None:
    """Plays windows and rollbacks, and asserts the invariants after each."""
    random = np.random.default_rng(seed)
    raw = np.full((1, CAPACITY, WIDTH), np.nan, np.float32)
    pooled = np.full((1, BLOCKS + rows, WIDTH), np.nan, np.float32)
    length, retained = 0, 0
    for count, dropped, event in script:
        count = min(count, CAPACITY - length)
        if not count:
            break
        retained = retained if event != "clear" and retention else 0
        values = random.normal(size=(MOST, WIDTH)).astype(np.float32)
        before = np.array(pooled)
        raw, pooled, complete, spoilt = map(
            np.array, program(rules, rows)(raw, pooled, retained, length, count, values)
        )
        assert not spoilt  # destinations are distinct
        assert complete == (length + count) // POSITIONS
        assert np.array_equal(bits(pooled[0, :complete]), bits(pool_once(raw, int(complete))))
        assert (
            np.isnan(pooled[0, complete:BLOCKS]).sum() == np.isnan(before[0, complete:BLOCKS]).sum()
        )  # nothing beyond is written
        kept = max(count - dropped, 0)
        length += kept
        retained = int(rules.retained_after(jnp.int32(complete), jnp.int32(length)))
        assert retained == min(int(complete), length // POSITIONS)
        assert 0 <= retained <= length // POSITIONS
        raw[0, length:] = np.nan  # rows beyond the length are never read again
        pooled[0, length // POSITIONS :] = np.nan


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([1, 8, 16]), st.booleans(), st.sampled_from(["kept", "rewritten"]))
def test_retained_keys_are_the_bits_of_pooling_everything_anew(script, rows, retention, fill):
    run(Rules(fill=fill), rows, script, retention)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([8, 16]))
def test_a_list_has_the_changed_blocks_first_and_fillers_that_touch_none_of_them(a, b, rows):
    retained, complete = sorted((a, b))
    updates = ops.update_list(jnp.int32(retained), jnp.int32(complete), rows, 64)
    real, filler = np.asarray(updates.real), np.asarray(updates.filler)
    count = min(complete - retained, rows)
    assert real.sum() == count and real[:count].all()
    assert np.asarray(updates.blocks)[:count].tolist() == list(range(retained, retained + count))
    destinations = np.asarray(updates.destinations)
    assert len(set(destinations)) == rows
    assert (destinations[filler] < complete).all() and filler.sum() in (0, rows - count)
    assert (destinations[~real & ~filler] >= 64).all()


def ceiling(retained, length):
    return jnp.minimum(retained, (length + POSITIONS - 1) // POSITIONS)


def by_start_alone(retained, length):
    return jnp.minimum(retained, jnp.maximum(length - 1, 0) // POSITIONS + 1)


def before_rollback(retained, length):
    return retained + 0 * length


def colliding(retained, complete, rows, capacity) -> UpdateList:
    updates = ops.update_list(retained, complete, rows, capacity)
    row = jnp.arange(rows)
    blocks = jnp.where(updates.real, updates.blocks, jnp.where(updates.filler, row, 0))
    destinations = jnp.where(updates.filler, blocks, updates.destinations)
    return dataclasses.replace(updates, blocks=blocks, destinations=destinations)


def short(retained, complete, rows, capacity) -> UpdateList:
    return ops.update_list(retained, jnp.maximum(complete - 1, 0), rows, capacity)


def of_three(raw, layer, blocks):
    return ops.mean_keys(raw.at[:, 3::4].set(0.0), layer, blocks)


def reordered(raw, layer, blocks):
    return ops.mean_keys(
        jnp.flip(raw.reshape(1, -1, 4, raw.shape[-1]), 2).reshape(raw.shape), layer, blocks
    )


MUTATIONS = {
    "ceiling": Rules(retained_after=ceiling),
    "by_start_alone": Rules(retained_after=by_start_alone),
    "before_rollback": Rules(retained_after=before_rollback),
    "fillers_on_real_destinations": Rules(update_list=colliding),
    "one_block_short": Rules(update_list=short),
    "pooled_before_written": Rules(write_first=False),
    "mean_of_three": Rules(mean_keys=of_three),
    "other_order_of_summation": Rules(mean_keys=reordered),
}

LONG = [(6, d, "") for d in (0, 5, 3, 0, 1, 4, 2, 0, 0, 5, 0, 3, 1, 0, 0, 2, 0, 0, 1, 0)]


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_wrong_rule_is_caught(name):
    run(Rules(), 8, LONG)
    with pytest.raises(AssertionError):
        run(MUTATIONS[name], 8, LONG)


def test_one_program_serves_every_update_count():
    traced = 0

    def counted(retained, complete):
        nonlocal traced
        traced += 1
        return ops.update_list(retained, complete, 8, BLOCKS)

    compiled = jax.jit(counted)
    for count in range(9):
        compiled(jnp.int32(10), jnp.int32(10 + count))
    assert traced == 1


def block(number: int, cells: tuple[int, ...], **changes) -> Descriptor:
    start = number * POSITIONS
    plain = Descriptor(
        stream=0,
        start=start,
        cells=cells,
        key_cell=cells[-1],
        positions=(start, start, start, start),
    )
    return dataclasses.replace(plain, **changes)


@st.composite
def caches(draw):
    """Shuffled cells, some of them shared or recycled."""
    count = draw(st.integers(1, 10))
    cells = np.asarray(draw(st.permutations(range(count * POSITIONS + 4))))
    blocks = [
        block(b, tuple(int(c) for c in cells[b * POSITIONS : (b + 1) * POSITIONS]))
        for b in range(count)
    ]
    spoilt = draw(st.lists(st.integers(0, count * POSITIONS - 1), max_size=2))
    how = draw(st.sampled_from(["shared", "recycled", "dead"]))
    length = draw(st.integers(0, count * POSITIONS))
    positions = np.zeros(len(cells), int)
    positions[cells[: count * POSITIONS]] = np.arange(count * POSITIONS)
    live = np.zeros(len(cells), bool)
    live[cells[:length]] = True
    owners = [frozenset({0}) for _ in cells]
    for position in spoilt:
        cell = int(cells[position])
        if how == "shared":
            owners[cell] = frozenset({0, 1})
        elif how == "dead":
            live[cell] = False
        else:
            positions[cell] += 1
    first = min((p // POSITIONS for p in spoilt), default=count)
    return blocks, Cells(live=live, positions=positions, owners=owners), length, first


@settings(max_examples=200, deadline=None)
@given(caches())
def test_a_rollback_keeps_every_block_before_it_up_to_the_first_spoilt_one(cache):
    blocks, cells, length, first = cache
    kept = retained_prefixes({4: [blocks]}, cells, start=length, stop=-1)
    assert kept == {4: [blocks[: min(length // POSITIONS, first)]]}
    retained = int(ops.retained_after(jnp.int32(len(blocks)), jnp.int32(length)))
    assert len(kept[4][0]) <= retained
    changed = changed_blocks(blocks, kept[4][0])
    assert changed == list(range(len(kept[4][0]), len(blocks)))
    for rows in (8, 16):
        listed = padded_list(changed, blocks, target=rows, tokens=6, cache_size=64)
        destinations = [b.destination(64) for b in listed]
        assert len(set(destinations)) == len(listed)
        assert listed[: len(changed)] == [blocks[i] for i in changed]
        small = len(changed) <= rows <= len(blocks)
        assert len(listed) == (rows if small else max(1, len(changed)))


GUARDS = [
    {"preserve": False},
    {"indexer": False},
    {"streams": 2},
    {"sequence": 1},
    {"start": -1},
    {"stop": 9},
]


@pytest.mark.parametrize("change", GUARDS, ids=lambda change: next(iter(change)))
def test_any_other_removal_keeps_nothing(change):
    blocks = [block(0, (0, 1, 2, 3))]
    cells = Cells(live=np.ones(4, bool), positions=np.arange(4), owners=[frozenset({0})] * 4)
    asked = {"start": 4, "stop": -1} | change
    assert retained_prefixes({4: [blocks]}, cells, start=4, stop=-1) == {4: [blocks]}
    assert retained_prefixes({4: [blocks]}, cells, **asked) == {}
    assert retained_prefixes({4: [blocks, []]}, cells, start=4, stop=-1) == {4: []}
    with pytest.raises(ValueError, match="recurrent"):
        retained_prefixes({4: [blocks]}, cells, start=4, stop=-1, recurrent_accepted=False)


@dataclasses.dataclass(frozen=True)
class DescriptorRules:
    """How descriptors are compared; either may be replaced by a wrong one."""

    retained_prefixes: Callable = retained_prefixes
    changed_blocks: Callable = changed_blocks


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["append", "roll back", "move"]), st.integers(1, 9), st.integers(0, 99)
    ),
    min_size=4,
    max_size=25,
)


def recycle(rules: DescriptorRules, events) -> None:
    """Plays a cache whose cells are recycled and moved, and pools the blocks found changed.

    After every update each complete block's stored key must be the one that its cells give.
    """
    size = 40
    contents, where = np.zeros(size), list[int]()  # by cell; the cell of each position
    keys, known = np.full(size, np.nan), list[Descriptor]()
    for value, (event, amount, seed) in enumerate(events):
        random = np.random.default_rng(seed)
        free = [int(c) for c in random.permutation(size) if c not in where]
        if event == "append":
            new = free[:amount]
            where += new
            contents[new] = value + random.random(len(new))
        elif event == "move" and where and free:  # a token goes to another cell, as compaction does
            position = int(random.integers(len(where)))
            contents[free[0]], where[position] = contents[where[position]], free[0]
        else:
            del where[max(len(where) - amount, 0) :]
            live, positions = np.zeros(size, bool), np.zeros(size, int)
            live[where], positions[where] = True, np.arange(len(where))
            owners = [frozenset({0})] * size
            cells = Cells(live=live, positions=positions, owners=owners)
            kept = rules.retained_prefixes({4: [known]}, cells, start=len(where), stop=-1)
            (known,) = kept[4]
            continue
        complete = range(len(where) // POSITIONS)
        current = [block(b, tuple(where[4 * b : 4 * b + 4])) for b in complete]
        for b in rules.changed_blocks(current, known):
            keys[current[b].destination(size)] = contents[list(current[b].cells)].sum()
        known = current
        for found in current:
            assert keys[found.destination(size)] == contents[list(found.cells)].sum()


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_keys_of_recycled_and_moved_cells_are_pooled_anew(events):
    recycle(DescriptorRules(), events)


def kept_by_start(entries, cells, *, start, stop):
    """Asks for a block's start alone, not for its end nor for its cells."""
    del cells, stop
    return {4: [[b for b in entries[4][0] if b.start < start]]}


def positions_alone(current, retained):
    """Compares positions, not the cells that hold them."""
    starts = [b.start for b in retained]
    return [i for i, b in enumerate(current) if b.start not in starts]


WRONG_RULES = {
    "retained by start alone": DescriptorRules(kept_by_start, positions_alone),
    "positions compared alone": DescriptorRules(retained_prefixes, positions_alone),
    "retained whatever the cells": DescriptorRules(lambda entries, *_, **__: entries),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_every_wrong_rule_of_descriptors_is_caught(name):
    find = functools.partial(recycle, WRONG_RULES[name])
    with pytest.raises(AssertionError):
        for seed in range(200):
            random = np.random.default_rng(seed)
            kinds = random.choice(["append", "append", "roll back", "move"], 20)
            find([(kind, int(random.integers(1, 10)), seed + i) for i, kind in enumerate(kinds)])


WRONG = [
    {"cells": (0, 1, 2)},
    {"stream": 1},
    {"start": -4},
    {"start": 4},
    {"key_cell": 9},
    {"positions": (0, 0, 1, 0)},
    {"cells": (0, 1, 2, 99)},
    {"cells": (1, 0, 2, 3)},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_each_condition_of_a_valid_block_counts(change):
    cells = Cells(live=np.ones(8, bool), positions=np.arange(8), owners=[frozenset({0})] * 8)
    good = block(0, (0, 1, 2, 3))
    assert is_valid(good, 4, 4, cells)
    assert not is_valid(good, 4, 3, cells)
    assert not is_valid(dataclasses.replace(good, **change), 4, 4, cells)


def test_the_list_of_the_method_equals_the_contiguous_one():
    for retained in range(12):
        for complete in range(retained, min(retained + 6, 14)):
            blocks = [block(b, tuple(range(4 * b, 4 * b + 4))) for b in range(complete)]
            changed = list(range(retained, complete))
            fallback = block(0, (0, 1, 2, 3))
            listed = padded_list(
                changed, blocks, target=8, tokens=6, cache_size=64, fallback=fallback
            )
            updates = ops.update_list(jnp.int32(retained), jnp.int32(complete), 8, 16)
            ours = np.asarray(updates.blocks)[np.asarray(updates.real | updates.filler)]
            if complete >= 8:
                assert [b.start // 4 for b in listed] == ours.tolist()
            else:
                assert [b.start // 4 for b in listed[: len(changed)]] == ours.tolist()
