"""Random weights in GGUF block formats, of a stated size, at about a gigabyte a second.

Every byte is random except scales, which are drawn so that the values' mean is near zero and their
root mean square is the one asked for. Nothing repeats. The code knows no models and no files.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Int8

CHUNK_BYTES = 8 << 20
"""Bytes made at a time; part of what a seed means, since every chunk has its own stream."""


def _scales(raw: np.ndarray, largest: float) -> np.ndarray:
    """Returns float16 scales between 0.75 and 1.25 of `largest`, from random bytes."""
    return ((0.75 + raw.astype(np.float32) / 510) * largest).astype(np.float16)


def _put(blocks: np.ndarray, at: int, halves: np.ndarray) -> None:
    blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)


def _fill_q8_0(blocks: np.ndarray, rms: float) -> None:
    _put(blocks, 0, _scales(blocks[:, 0], rms / np.sqrt(np.mean(np.arange(-128.0, 128) ** 2))))


def _fill_q5_0(blocks: np.ndarray, rms: float) -> None:
    _put(blocks, 0, _scales(blocks[:, 0], rms / np.sqrt(np.mean(np.arange(-16.0, 16) ** 2))))


def _fill_q4_k(blocks: np.ndarray, rms: float) -> None:
    """Scales are 32..63 and minima 44..58 of 63; dmin is what makes the mean of a block zero."""
    raw = blocks[:, 4:12].copy()
    scale, least = 32 + (raw & 31), 44 + 2 * (raw >> 5)
    blocks[:, 4:8] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    blocks[:, 8:12] = least[:, :4] | (least[:, 4:] >> 4) << 6
    blocks[:, 12:16] = scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    scales, quants, minima = np.arange(32.0, 64), np.arange(16.0), np.arange(44.0, 60, 2)
    ratio = scales.mean() * quants.mean() / minima.mean()
    values = scales[:, None, None] * quants[:, None] - ratio * minima
    square = np.mean(values**2)
    d = _scales(blocks[:, 0], rms / np.sqrt(square))
    _put(blocks, 0, d)
    _put(blocks, 2, (d * np.float16(ratio)).astype(np.float16))


def _fill_q6_k(blocks: np.ndarray, rms: float) -> None:
    """Scales are 64..127 in size, of either sign."""
    raw = blocks[:, 192:208].view(np.int8)
    sign = raw >> 7
    blocks[:, 192:208] = (((64 + (raw & 63)) ^ sign) - sign).view(np.uint8)
    square = np.mean(np.arange(64.0, 128) ** 2) * np.mean(np.arange(-32.0, 32) ** 2)
    _put(blocks, 208, _scales(blocks[:, 208], rms / np.sqrt(square)))


def _sign_q8_0(values: np.ndarray, size: float) -> np.ndarray:
    blocks = np.empty((len(values), 34), np.uint8)
    _put(blocks, 0, np.full(len(values), size / 64, np.float16))
    blocks[:, 2:] = (64 * values).view(np.uint8)
    return blocks


def _sign_q4_k(values: np.ndarray, size: float) -> np.ndarray:
    """Codes are 0, 7 and 14, scales 1 and minima 7: (code - 7) d."""
    blocks = np.empty((len(values), 144), np.uint8)
    d = np.full(len(values), size / 7, np.float16)
    _put(blocks, 0, d)
    _put(blocks, 2, d)
    blocks[:, 4:16] = np.repeat(np.array([1, 7, 1 | 7 << 4], np.uint8), 4)
    codes = (7 * values + 7).view(np.uint8).reshape(-1, 4, 2, 32)
    blocks[:, 16:] = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    return blocks


def _sign_q6_k(values: np.ndarray, size: float) -> np.ndarray:
    """Codes are 16, 32 and 48: their two high bits are 1, 2 and 3, the others 0."""
    blocks = np.zeros((len(values), 210), np.uint8)
    high = (values + 2).view(np.uint8).reshape(-1, 2, 4, 32)
    packed = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    blocks[:, 128:192] = packed.reshape(-1, 64)
    blocks[:, 192:208] = 64
    _put(blocks, 208, np.full(len(values), size / 1024, np.float16))
    return blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A quantised format: its type in GGUF and how blocks of it are made.

    Attributes:
      kind: the type as the gguf package names it.
      fallback: name of the format that stands in where rows are no whole number of blocks.
      fill: writes scales into random blocks [n, bytes] for values of a given root mean square.
      sign: returns blocks of values -1, 0 and 1 [n, elements] times a size; None where no use asks.
    """

    kind: GGMLQuantizationType
    fallback: str | None
    fill: Callable[[np.ndarray, float], None]
    sign: Callable[[np.ndarray, float], np.ndarray] | None = None

    @property
    def block(self) -> tuple[int, int]:
        """Elements and bytes of a block."""
        return GGML_QUANT_SIZES[self.kind]


FORMATS = {
    "Q8_0": BlockFormat(
        kind=GGMLQuantizationType.Q8_0, fallback=None, fill=_fill_q8_0, sign=_sign_q8_0
    ),
    "Q6_K": BlockFormat(
        kind=GGMLQuantizationType.Q6_K, fallback="Q8_0", fill=_fill_q6_k, sign=_sign_q6_k
    ),
    "Q5_0": BlockFormat(kind=GGMLQuantizationType.Q5_0, fallback=None, fill=_fill_q5_0),
    "Q4_K": BlockFormat(
        kind=GGMLQuantizationType.Q4_K, fallback="Q5_0", fill=_fill_q4_k, sign=_sign_q4_k
    ),
}


def fitting(name: str, row: int) -> str:
    """Returns the format that llama-quantize takes for rows of this length where `name` is asked.

    Args:
      name: a key of `FORMATS`.
      row: elements of a row.

    Raises:
      ValueError: no format has blocks that divide the row.
    """
    if row % FORMATS[name].block[0] == 0:
        return name
    fallback = FORMATS[name].fallback
    if fallback is None:
        raise ValueError(f"{row=} must be a multiple of {FORMATS[name].block[0]} for {name}")
    return fitting(fallback, row)


def random_blocks(
    name: str, shape: tuple[int, int], rms: float, seed: tuple[int, ...]
) -> Iterator[np.ndarray]:
    """Yields the bytes of a random matrix as uint8 [blocks, bytes of a block], piece by piece.

    Args:
      name: a key of `FORMATS`.
      shape: rows and elements of a row, whole blocks.
      rms: root mean square of the values, within 2 %.
      seed: the same numbers give the same bytes.
    """
    form = FORMATS[name]
    elements, size = form.block
    total, step = shape[0] * shape[1] // elements, CHUNK_BYTES // size
    for index, start in enumerate(range(0, total, step)):
        count = min(step, total - start)
        rng = np.random.Generator(np.random.SFC64([*seed, index]))
        words = rng.integers(0, 2**64, -(-count * size // 8), dtype=np.uint64)
        blocks = words.view(np.uint8)[: count * size].reshape(count, size)
        form.fill(blocks, rms)
        yield blocks


def signed_blocks(name: str, values: Int8[np.ndarray, "rows row"], size: float) -> np.ndarray:
    """Returns the bytes of a matrix of -1, 0 and 1 times a size, uint8 [blocks, bytes of a block].

    Args:
      name: a key of `FORMATS`.
      values: the matrix; rows are whole blocks.
      size: exact but for one rounding to float16.

    Raises:
      ValueError: the format cannot.
    """
    form = FORMATS[name]
    if form.sign is None:
        raise ValueError(f"{name} has no signs here; use rows that are a multiple of 256")
    return form.sign(values.reshape(-1, form.block[0]), size)
