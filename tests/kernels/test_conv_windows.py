"""Windows of a convolution's past: one load writes them all, where nothing overlaps."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.conv_windows import (
    Span,
    WindowCopy,
    loads_of_separate_copies,
    separable_windows,
    window_start,
    write_windows,
)

HISTORY, INPUTS = Span(buffer="s", start=0, stop=96), Span(buffer="t", start=0, stop=192)
JOINED = Span(buffer="x", start=0, stop=288)


def copy(i: int, **changes) -> WindowCopy:
    target = Span(buffer="cache", start=96 * i, stop=96 * (i + 1))
    plain = WindowCopy(first=i, target=target, buffer_bytes=960)
    return dataclasses.replace(plain, **changes)


def found(copies, sizes: tuple[int, int] = (3, 6), pending=()):
    history_rows, input_rows = sizes
    return separable_windows(HISTORY, INPUTS, JOINED, history_rows, input_rows, copies, pending)


def test_windows_are_the_history_after_every_count_to_the_bit():
    random = np.random.default_rng(0)
    history = random.integers(0, 2**32, (3, 10), np.uint32).view(np.float32)
    inputs = random.integers(0, 2**32, (6, 10), np.uint32).view(np.float32)
    firsts = [window_start(6, dropped) for dropped in range(6)]
    joined, windows, loads = write_windows(history, inputs, firsts)
    stepwise = history.view(np.uint32)
    states = []
    for row in inputs.view(np.uint32):
        stepwise = np.concatenate([stepwise[1:], row[None]])
        states.append(stepwise)
    for dropped, window in enumerate(windows):
        assert np.array_equal(window.view(np.uint32), states[5 - dropped])
    assert np.array_equal(joined.view(np.uint32)[3:], inputs.view(np.uint32))
    assert (loads, loads_of_separate_copies(3, 6, 6)) == (9, 27)
    assert loads_of_separate_copies(3, 5, 3) == 17


def test_as_many_copies_as_qualify_are_taken_up_to_eight():
    assert found([copy(i) for i in range(4)]) == ([copy(i) for i in range(4)], False)
    many = [copy(i, first=i % 7, buffer_bytes=9999) for i in range(10)]
    assert len(found(many)[0]) == 8
    assert found([copy(0)]) == ([], False)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"regular": False},
        {"first": -1},
        {"first": 7},
        {"buffer_bytes": 200},
        {"target": Span(buffer="x", start=280, stop=376)},
        {"target": Span(buffer="cache", start=95, stop=191)},
    ],
    ids=str,
)
def test_the_first_copy_that_does_not_qualify_ends_the_search(change):
    copies = [copy(0), copy(1), copy(2, **change), copy(3)]
    assert found(copies) == ([copy(0), copy(1)], False)


@pytest.mark.parametrize("sizes", [(9, 6), (3, 9), (0, 6), (3, 0), (9, 8)])
def test_other_sizes_take_the_ordinary_path(sizes):
    assert found([copy(i) for i in range(4)], sizes) == ([], False)


def test_an_earlier_write_to_a_destination_is_waited_for():
    earlier = Span(buffer="cache", start=100, stop=104)
    assert found([copy(0), copy(1)], pending=[earlier])[1]
    assert not found([copy(0), copy(1)], pending=[Span(buffer="other", start=0, stop=999)])[1]
