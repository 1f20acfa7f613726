"""Products of pairs of bfloat16: fragments of an image, and how exact they are."""

import numpy as np
import pytest

from pallas_kernels.split_tiles import (
    Image,
    Left,
    RightOfColumns,
    RightOfRows,
    fragment,
    multiply,
    split,
)
from tests.kernels.bulk_model import BulkGrid


def stored(image: Image, values: np.ndarray) -> np.ndarray:
    """Returns the words of an image, written pair by pair."""
    isa = BulkGrid(1, 128, 256)
    row, column = (x.reshape(-1) for x in np.mgrid[: image.rows, : image.columns : 2])
    pairs = values.reshape(-1, 2).astype(np.float32)
    words = np.zeros(image.bytes // 4, np.uint32)
    high, low = split(isa, pairs[:, 0], pairs[:, 1])
    words[image.offset(row, column) // 4] = high
    words[(image.offset(row, column) + image.plane_bytes) // 4] = low
    return words


def warp_with(words: np.ndarray) -> BulkGrid:
    isa = BulkGrid(1, 128, 4 * words.size)
    isa.memory[0], isa.writer[0] = words, -1
    isa.sent_by[0], isa.waited[0] = 0, True
    return isa


def tiles_of(sums) -> np.ndarray:
    """Returns [16, 8] of the first warp's sums."""
    lane = np.arange(32)
    tile = np.zeros((16, 8))
    for i, value in enumerate(sums):
        tile[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = value[:32]
    return tile


@pytest.mark.parametrize("columns", [64, 128])
def test_a_product_of_images_is_good_to_sixteen_bits(columns):
    rng = np.random.default_rng(0)
    image = Image(rows=64, columns=columns)
    values = rng.normal(size=(64, columns))
    isa = warp_with(stored(image, values))
    lane = isa.thread_index() & 31
    left = Left(isa, image, isa.Word(0), lane, isa.Word(16))
    by_rows = RightOfRows(isa, image, isa.Word(0), lane)
    sums = [[isa.Float(0.0)] * 4 for _ in range(8)]
    for step in range(columns // 16):
        rights = [right for pair in range(4) for right in by_rows.load(step, pair)]
        sums = multiply(isa, [left.load(step)] * 8, rights, sums)
    got = np.concatenate([tiles_of(tile) for tile in sums], axis=1)
    want = values[16:32] @ values.T
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-5
    # Sums become left-hand operands, and the image the right-hand one as it is.
    by_columns = RightOfColumns(isa, image, isa.Word(0), lane)
    outs = [[isa.Float(0.0)] * 4 for _ in range(columns // 8)]
    for step in range(4):
        left = fragment(isa, *sums[2 * step : 2 * step + 2])
        rights = [right for pair in range(columns // 16) for right in by_columns.load(step, pair)]
        outs = multiply(isa, [left] * len(rights), rights, outs)
    got = np.concatenate([tiles_of(tile) for tile in outs], axis=1)
    want = want @ values
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-5


@pytest.mark.parametrize("columns", [64, 128])
def test_eight_rows_of_a_piece_lie_in_eight_banks(columns):
    image = Image(rows=64, columns=columns)
    for first in (0, 8, 56):
        for column in range(0, columns, 8):
            places = {image.offset(first + row, column) // 16 % 8 for row in range(8)}
            assert len(places) == 8
    every = {image.offset(row, column) for row in range(64) for column in range(columns)}
    assert every == set(range(0, image.plane_bytes, 2))
