"""Sessions: what is read again and what is not, and that it shows in nothing else."""

import dataclasses
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import (
    BOTH,
    PENALISED,
    answer,
    assert_close,
    assert_same_bits,
    fresh,
    model,
    session,
    text,
)

import openjet_jax as oj
from openjet_jax.checkpoint_store import CheckpointStore
from openjet_jax.token_splice import spliced


def positions(session: oj.Session) -> list[int]:
    return [facts.position for facts in session.inspect().checkpoints]


def test_a_second_turn_reads_only_its_new_tokens():
    ours = session()
    ours.append(text(60))
    first = answer(ours)
    assert ours.reuse == oj.Reuse(reused=0, read=60)
    ours.append(text(5, seed=1))
    out = ours.generate(max_new_tokens=12, ignore_eos=True)
    assert ours.reuse == oj.Reuse(reused=76, read=5)
    assert (out.stats.prompt_tokens, out.stats.reused_tokens) == (5, 76)
    history = [*text(60), *first, *text(5, seed=1)]
    assert out.token_ids.tolist() == fresh(history, 12)
    assert list(ours.ids) == [*history, *out.token_ids.tolist()]


def test_what_was_read_ahead_counts_to_the_answer_that_follows():
    ours, theirs = session(), session()
    for each in (ours, theirs):
        each.append(text(60))
        answer(each)
        each.append(text(5, seed=1))
    for _ in ours.reading():
        pass
    ahead, at_once = (each.generate(max_new_tokens=4, ignore_eos=True) for each in (ours, theirs))
    for out in (ahead, at_once):
        assert (out.stats.prompt_tokens, out.stats.reused_tokens) == (5, 76)
        assert 0 < out.stats.prefill_s < out.stats.first_token_s
    again = ours.generate(max_new_tokens=4, ignore_eos=True)
    assert (again.stats.prompt_tokens, again.stats.prefill_s) == (0, 0.0)


def test_checkpoints_lie_at_prompt_ends_turn_ends_and_intervals():
    ours = session()
    ours.append(text(70))
    answer(ours, 40)
    ours.append([1, 2, 3])
    ours.read()
    facts = ours.inspect().checkpoints
    kinds = {facts.position: facts.kind for facts in facts}
    assert {p: kinds[p] for p in (32, 64, 69, 109, 112)} == {
        32: "interval",
        64: "interval",
        69: "prompt",
        109: "turn",
        112: "prompt",
    }
    assert max(np.diff([0, *kinds])) <= 32


def test_an_edit_reads_from_the_checkpoint_before_it():
    ours = session()
    ours.append(text(130))
    answer(ours)
    edited = [*ours.ids[:70], 1, 2, 3, *ours.ids[70:]]
    ours.replace(edited)
    assert ours.inspect().unread == len(edited) - 64
    reuse = ours.read()
    assert reuse == oj.Reuse(reused=64, read=len(edited) - 64)
    assert reuse.read <= len(edited) - 70 + 32
    theirs = session()
    theirs.append(edited)
    theirs.read()
    assert_close(ours, theirs)
    assert answer(ours) == answer(theirs)
    ours.replace([*edited[:70], 9, *edited[73:]])
    assert ours.read().reused == 70  # where the first edit began


@BOTH
@settings(max_examples=12, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=4))
def test_any_edits_leave_the_state_of_a_fresh_reading(architecture, edits):
    """Each (at, count) cuts the history and appends, reading or generating in between."""
    ours = session(architecture)
    ours.append(text(50))
    for i, (at, count) in enumerate(edits):
        ours.truncate(min(at, len(ours.ids)))
        ours.append(text(count, seed=i + 1))
        answer(ours, 6) if i % 2 else ours.read()
    ours.append([5])
    reuse = ours.read()
    assert reuse.reused + reuse.read == len(ours.ids)
    theirs = session(architecture)
    theirs.append(ours.ids)
    theirs.read()
    assert_close(ours, theirs)


def test_an_answer_given_again_reads_one_token_and_is_the_same():
    ours = session()
    ours.append(text(60))
    first = answer(ours, sampling=PENALISED)
    ours.truncate(60)
    assert answer(ours, sampling=PENALISED) == first
    assert ours.reuse == oj.Reuse(reused=59, read=1)


def test_a_stop_string_leaves_the_history_that_was_reported():
    ours = session()
    ours.append(text(60))
    whole = ours.fork().generate(max_new_tokens=30, ignore_eos=True, depth=5)
    tokenizer = model().tokenizer
    stop = next(t for t in whole.token_ids[5:] if tokenizer.decode([t]).isascii())
    out = ours.generate(
        max_new_tokens=30, ignore_eos=True, depth=5, stop=[tokenizer.decode([stop])]
    )
    end = len(out.token_ids)
    assert out.finish_reason == "stop" and end < 30
    assert list(ours.ids) == [*text(60), *whole.token_ids[:end]]
    assert len(ours._memory.conversation.ids) > len(ours.ids)
    ours.append([7, 8])
    theirs = session()
    theirs.append(ours.ids)
    for each in (ours, theirs):
        each.read()
    assert_close(ours, theirs)
    assert answer(ours) == answer(theirs)


@BOTH
@pytest.mark.parametrize("sampling", [oj.Sampling(), PENALISED], ids=["greedy", "penalised"])
def test_an_answer_in_two_parts_is_the_answer_in_one(architecture, sampling):
    ours, theirs = session(architecture), session(architecture)
    for each in (ours, theirs):
        each.append(text(60))
    whole = answer(theirs, 40, sampling=sampling)
    first = answer(ours, 13, sampling=sampling)
    second = ours.generate(
        max_new_tokens=27, sampling=sampling, continued=True, ignore_eos=True, depth="5/2"
    )
    assert [*first, *second.token_ids.tolist()] == whole
    for each in (ours, theirs):
        each.append([1])
        each.read()
    assert_same_bits(ours, theirs)


def test_a_stream_that_is_closed_leaves_the_tokens_of_its_pieces():
    ours = session()
    ours.append(text(60))
    stream = ours.stream(max_new_tokens=40, ignore_eos=True, cycles_per_dispatch=1)
    seen = [*next(stream).token_ids, *next(stream).token_ids]
    ours.append([3])  # ends the stream
    assert list(ours.ids) == [*text(60), *seen, 3]
    assert list(stream) == []
    assert answer(ours) == fresh([*text(60), *seen, 3])


def test_reading_can_be_left_and_taken_up_again():
    ours = session()
    ours.append(text(130))
    reading = ours.reading()
    left = [next(reading), next(reading)]
    assert left == [130 - 33, 130 - 65]
    ours.append([1])
    assert [piece.token_ids for piece in ours.stream(every_dispatch=True, max_new_tokens=1)][
        :-1
    ] == [[], [], []]
    assert ours.reuse == oj.Reuse(reused=65, read=66)
    theirs = session()
    theirs.append(ours.ids)
    assert_read_alike(ours, theirs)


def assert_read_alike(*both: oj.Session) -> None:
    for each in both:
        each.append([9])
        each.read()
    assert_close(*both)


def test_forks_do_not_see_each_other():
    ours = session()
    ours.append(text(60))
    ours.read()
    forks = [ours.fork() for _ in range(3)]
    samplings = [dataclasses.replace(PENALISED, seed=seed) for seed in range(3)]
    steps = [
        fork.stream(max_new_tokens=20, sampling=s, ignore_eos=True)
        for fork, s in zip(forks, samplings, strict=True)
    ]
    answers: list[list[int]] = [[], [], []]
    while any([next(step, None) for step in steps]):  # by turns
        pass
    answers = [list(fork.ids[60:]) for fork in forks]
    assert len({tuple(a) for a in answers}) == 3
    assert all(fork.reuse == oj.Reuse(reused=60, read=0) for fork in forks)
    for s, a in zip(samplings, answers, strict=True):
        assert a == fresh(text(60), 20, sampling=s)
    forks[0].close()
    gc.collect()
    assert answer(ours) == fresh(text(60))
    with pytest.raises(ValueError, match="closed"):
        forks[0].read()


def test_checkpoints_stay_within_their_budget_and_text_does_not_depend_on_it():
    one = session()
    one.append(text(4))
    one.read()
    size = one.inspect().checkpoints[0].nbytes
    histories = []
    for device, host in ((3, 2), (0, 2), (0, 0), (1, 0)):
        budget = oj.CheckpointBudget(device_bytes=device * size, host_bytes=host * size)
        ours = session(budget=budget)
        ours.append(text(130))
        answer(ours)
        places = [facts.place for facts in ours.inspect().checkpoints]
        assert (places.count("device"), places.count("host")) == (device, host)
        ours.truncate(100)
        ours.append([1, 2])
        answer(ours)
        histories.append(ours.ids)
    assert len(set(histories)) == 1


def test_the_checkpoints_that_stay_are_spread_over_the_history():
    one = session()
    one.append(text(4))
    one.read()
    checkpoint, size = one._memory.checkpoints.peek(3), one.inspect().checkpoints[0].nbytes
    store = CheckpointStore(oj.CheckpointBudget(device_bytes=0, host_bytes=6 * size))
    for position in range(100, 3300, 100):
        store.put(position, "interval", checkpoint)
    kept = store.positions
    assert len(kept) == 6 and kept[-1] == 3200
    assert kept[0] <= 2400 and max(np.diff(kept)) >= 200
    assert store.position_before(3199) == kept[-2] and store.position_before(99) is None


def test_an_interrupted_dispatch_costs_a_reading_and_nothing_else():
    ours = session()
    ours.append(text(60))
    first = answer(ours)
    state = ours._memory.conversation.state
    state.length.delete()  # as donation to a program whose result never came
    ours.append([1])
    assert answer(ours) == fresh([*text(60), *first, 1])
    assert ours.reuse.reused == 0


def test_nothing_compiles_once_every_operation_was_used():
    def use(seed):
        ours = session()
        ours.append(text(60, seed=seed))
        answer(ours, 5)
        ours.truncate(40)
        answer(ours.fork(), 5)
        ours.close()

    use(0)
    before = len(model().programs[next(iter(model().programs))].events)
    use(1)
    assert len(model().programs[next(iter(model().programs))].events) == before


def test_turns_leave_no_objects_behind():
    ours = session(prefixes=oj.PrefixCache(1 << 20), isolation_key="a")

    def turns(count):
        for seed in range(count):
            ours.replace([*text(40), *text(30, seed=seed % 2)])
            answer(ours, 5)
            ours.publish()
        gc.collect()
        return len(gc.get_objects())

    turns(4)
    before = turns(4)
    assert turns(20) <= before + 20


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda s: s.read(), "append a prompt first"),
        (lambda s: s.generate(), "append a prompt first"),
        (lambda s: s.append(text(201)), "201 tokens do not fit context=200"),
        (lambda s: s.append([300]), "300 must be in 0..287"),
        (lambda s: s.truncate(1), "length=1 must be in 0..0"),
        (lambda s: (s.append([1]), s.generate(max_new_tokens=0)), "max_new_tokens=0"),
        (lambda s: (s.append(text(200)), s.generate()), "201 tokens do not fit context=200"),
        (lambda s: session(checkpoint_every=0), "checkpoint_every=0 must be at least 1"),
        (lambda s: session(prefixes=oj.PrefixCache()), "isolation_key"),
        (lambda s: oj.CheckpointBudget(host_bytes=-1), "host_bytes=-1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_limit(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(session())


def test_a_conversation_rendered_anew_keeps_the_tokens_of_the_same_text():
    ours, tokenizer = session(), model().tokenizer
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi there"}]
    history = model().render(said, add_generation_prompt=False)
    letters = [tokenizer.encode(letter)[0] for letter in "Hi there"]  # as a model may cut it
    end = len(history) - 2  # behind the answer come <|im_end|> and a line's end
    begin = end - len(tokenizer.encode("Hi there"))
    known = [*history[:begin], *letters, history[end]]
    assert letters != history[begin:end]
    ours.replace(known)
    ours.read()
    messages = [*said, {"role": "user", "content": "Go on"}]
    ours.converse(messages)
    assert list(ours.ids[: len(known)]) == known
    assert ours.read().reused == len(known)
    assert ours.text == tokenizer.decode(model().render(messages), skip_special=False)
    ours.converse(messages, keep_tokens=False)
    assert list(ours.ids) == model().render(messages)


def test_a_template_that_drops_thoughts_costs_the_last_turn_alone():
    ours, messages, stable = session(), [], 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"{turn}?"})
        ours.converse(messages)
        thought = ours.generate(max_new_tokens=4, ignore_eos=True).text
        assert ours.reuse.reused == stable
        stable = len(model().render(messages, add_generation_prompt=False))
        messages.append({"role": "assistant", "content": f"{thought}</think>\n\nYes"})


def test_a_splice_changes_no_text_and_ends_where_the_texts_do():
    tokenizer = model().tokenizer
    end = tokenizer.control_tokens["<|im_end|>"]
    start = tokenizer.control_tokens["<|im_start|>"]
    letters = [tokenizer.encode(c)[0] for c in "hello"]
    word, other = tokenizer.encode("hello"), tokenizer.encode("help")
    cases = [
        ([start, *letters, end], [start, *word, end, *other], [start, *letters, end, *other]),
        ([start, *letters], [start, *word, end], [start, *letters, end]),
        ([start, *letters, start], [start, *word, end], [start, *word, end]),
        ([start, *other, end], [start, *word, end], [start, *word, end]),
        ([end, *letters], [start, *letters], [start, *letters]),
        ([start, *letters[:3]], [start, *word, end], [start, *word, end]),
        ([], [start], [start]),
        ([start, *letters, end], [start, *word], [start, *word]),
    ]
    for known, rendered, expected in cases:
        found = spliced(known, rendered, tokenizer)
        assert found == expected
        assert tokenizer.decode(found, skip_special=False) == tokenizer.decode(
            rendered, skip_special=False
        )
