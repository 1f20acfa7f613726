"""Rows of n-grams: the published constants' vectors, and 64-bit arithmetic in NumPy."""

import functools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from openjet_jax.convert.ngram_keys import derived_multipliers, derived_sizes
from pallas_kernels.ngram_hash import ngram_rows

END = 248044
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
SIZES = derived_sizes(20_000_000, 16)
OFFSETS = tuple(sum(SIZES[:i]) for i in range(16))

VECTORS = {
    (1, END, END): (
        "16121432 28938500 59087997 73487090 81148277 104500129 120276032 149373875"
        " 176283436 184305849 216528839 231080079 257961536 266068568 289043455 305959965"
    ),
    (3, 2, 1): (
        "14605717 24410875 49313567 72177428 86060820 104022010 130963819 146886202"
        " 161523077 195939126 219424565 220811782 248020141 275228530 284297999 309645223"
    ),
    (8192, 4096, 1024): (
        "1155705 31211807 46433558 71960960 82614436 112873664 138301191 158943501"
        " 174756750 188038310 210431777 230072981 257194958 264362598 293428872 318835646"
    ),
}


@functools.cache
def program(length: int):
    return jax.jit(
        functools.partial(
            ngram_rows, multipliers=MULTIPLIERS, sizes=SIZES, offsets=OFFSETS, end=END
        )
    )


def reference(ids: list[int]) -> np.ndarray:
    """The same with Python integers, token by token."""
    rows = []
    for p in range(2, len(ids)):
        context, cut = [ids[p]], False
        for back in (1, 2):
            cut = cut or ids[p - back] == END
            context.append(END if cut else ids[p - back])
        mixed = context[0] * MULTIPLIERS[0] ^ context[1] * MULTIPLIERS[1]
        row = [mixed % n + o for n, o in zip(SIZES[:8], OFFSETS[:8], strict=True)]
        mixed ^= context[2] * MULTIPLIERS[2]
        rows.append(row + [mixed % n + o for n, o in zip(SIZES[8:], OFFSETS[8:], strict=True)])
    return np.asarray(rows)


def test_the_published_constants_follow_from_their_seed():
    assert derived_multipliers(248320, 3) == MULTIPLIERS
    assert SIZES[:3] == (20000003, 20000023, 20000033) and SIZES[-1] == 20000171
    assert OFFSETS[-1] == 300001275 and sum(SIZES) == 320001446


def test_the_three_vectors():
    for context, expected in VECTORS.items():
        ids = np.asarray(context[::-1], np.int32)
        assert program(3)(ids)[0].tolist() == [int(row) for row in expected.split()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 248319), st.just(END)), min_size=12, max_size=12))
def test_rows_are_those_of_exact_integers_and_end_tokens_cut(ids):
    assert np.array_equal(program(12)(np.asarray(ids, np.int32)), reference(ids))
