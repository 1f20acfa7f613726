"""One warp in NumPy: the instructions of `pallas_kernels.ptx` over arrays of 32 lanes."""

import jax.numpy as jnp
import numpy as np
import scipy.special


def Float(value):  # noqa: N802 (the name of the instruction set's type)
    return np.full(32, value, np.float32)


class Memory:
    """Shared memory as bytes; addresses are arrays of 32."""

    def __init__(self, words: np.ndarray):
        self.words = np.ascontiguousarray(words, np.uint32)

    def load_shared(self, address, offset=0, words=1):
        index = (address.astype(np.int64) + offset) // 4
        return [self.words[index + i] for i in range(words)]


class Instructions(Memory):
    Float = staticmethod(Float)

    @staticmethod
    def Word(value):  # noqa: N802 (the name of the instruction set's type)
        return np.full(32, value, np.uint32)

    @staticmethod
    def fma(a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    @staticmethod
    def permute_bytes(low, high, selector):
        both = low.astype(np.uint64) | (np.asarray(high).astype(np.uint64) << np.uint64(32))
        selector = np.asarray(selector, np.uint64)
        result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint64)
        for i in range(4):
            index = selector >> np.uint64(4 * i) & np.uint64(7)
            byte = (both >> (np.uint64(8) * index)) & np.uint64(255)
            result |= byte << np.uint64(8 * i)
        return result.astype(np.uint32)

    @staticmethod
    def merge(word, mask, pattern):
        return word & np.uint32(mask) ^ np.asarray(pattern, np.uint32)

    @staticmethod
    def add_halves(a, b):
        b = np.broadcast_to(np.asarray(b, np.uint32), a.shape).copy()
        return (a.view(np.float16) + b.view(np.float16)).view(np.uint32)

    @staticmethod
    def multiply_halves(a, b):
        b = np.broadcast_to(np.asarray(b, np.uint32), a.shape).copy()
        return (a.view(np.float16) * b.view(np.float16)).view(np.uint32)

    @staticmethod
    def half_to_float(word, high):
        return word.view(np.float16)[int(high) :: 2].astype(np.float32)

    @staticmethod
    def bfloat_to_float(pair, high):
        word = pair & np.uint32(0xFFFF0000) if high else pair << np.uint32(16)
        return word.view(np.float32)

    @staticmethod
    def byte_to_float(word, index, signed=False):
        byte = (word >> np.uint32(8 * index) & np.uint32(255)).astype(np.uint8)
        return (byte.view(np.int8) if signed else byte).astype(np.float32)

    @staticmethod
    def mma(a, b, c):
        g, t = np.arange(32) // 4, np.arange(32) % 4
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for i, word in enumerate(a):
            pair = word.view(np.float16).reshape(32, 2).astype(np.float64)
            for o in range(2):
                left[g + 8 * (i % 2), 2 * t + o + 8 * (i // 2)] = pair[:, o]
        for i, word in enumerate(b):
            pair = word.view(np.float16).reshape(32, 2).astype(np.float64)
            for o in range(2):
                right[2 * t + o + 8 * i, g] = pair[:, o]
        product = left @ right
        return [
            (product[g + 8 * (i // 2), 2 * t + i % 2] + c[i]).astype(np.float32) for i in range(4)
        ]


def random_planes(block, rows: int, k: int, *, seed: int = 2, size: float = 1e-2) -> dict:
    """Returns planes of random codes and scales; floats are normal, times `size`."""
    rng, planes = np.random.default_rng(seed), {}
    for name, spec in block.format.plane_specs(rows, k).items():
        if jnp.issubdtype(spec.dtype, jnp.floating):
            planes[name] = rng.normal(0, size, spec.shape).astype(spec.dtype)
        else:
            limit = 64 if name in ("scales", "mins") and spec.dtype == np.uint8 else 256
            planes[name] = rng.integers(0, limit, spec.shape, np.uint8).view(spec.dtype)
    return planes


class Operand:
    """The prepared activations that block `index` of a row meets."""

    def __init__(self, block, activations, index: int):
        tiles = activations.scales.shape[0] // 8
        sizes = np.cumsum([1024 * tiles, 8 * block.num_offsets * tiles])
        values, offsets, sums = np.split(np.asarray(activations.blocks)[index], sizes)
        self.values = values.reshape(8, tiles, 32, 4)
        self.all_offsets = offsets.reshape(tiles, 32, -1)
        self.all_sums = sums.reshape(tiles, 32, -1)

    def fragments(self, run, tile):
        return list(self.values[run, tile].T.copy())

    def offsets(self, tile):
        return list(self.all_offsets[tile].T.copy())

    def sums(self, tile):
        return list(self.all_sums[tile].T.copy())


def unit_product(block, words: np.ndarray, activations) -> np.ndarray:
    """Returns [R, 16]: one unit's outputs, before the activations' scales."""
    lane = np.arange(32, dtype=np.uint32)
    num_tiles = activations.scales.shape[0] // 8
    totals = [[Float(0.0)] * 4 for _ in range(num_tiles)]
    for index in range(words.size // block.words):
        isa = Instructions(words[index * block.words : (index + 1) * block.words])
        loaded = block.load(isa, np.zeros(32, np.uint32), lane)
        totals = block.product(isa, loaded, Operand(block, activations, index), totals)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    result = np.zeros((8 * num_tiles, 16), np.float32)
    for tile, total in enumerate(totals):
        for i in range(4):
            result[8 * tile + 2 * t + i % 2, g + 8 * (i // 2)] = total[i]
    return result


def silu(x):
    return (x * scipy.special.expit(x.astype(np.float64))).astype(np.float32)


def decode_product(x, weights, layer, block, tiles, epilogue="none", *, first=0):
    """The product of `pallas_kernels.decode_product` where K is not split, unit by unit."""
    assert tiles.parts == 1
    words = np.asarray(weights)[int(layer[0]), first // 16 :]
    scales = np.asarray(x.scales)[:, None]
    units = np.stack([unit_product(block, unit, x) * scales for unit in words], axis=1)
    if epilogue == "silu_gate":
        units = silu(units[..., :8]) * units[..., 8:]
    return jnp.asarray(units.reshape(len(units), -1))
