"""Prefill products: a warpgroup's whole work, run in NumPy on rings that are filled as it waits."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.prefill_blocks import DENSE_BLOCKS
from pallas_kernels.prefill_product import (
    UNITS,
    Plan,
    PrefillTiles,
    consume,
    prefill_activations,
    prefill_product,
)
from tests.kernels.block_model import Threads
from tests.kernels.test_decode_product import MEASURED
from tests.kernels.warp_model import Instructions, random_planes


class Warpgroup(Threads):
    """A consumer warpgroup; waiting for a ring's next stage fills it, as the producer would.

    Args of the constructor: words of shared memory, and for each ring its first `full` barrier,
    stages, bytes of a stage, place, and what comes: bytes [number, ...] per copy.
    """

    def __init__(self, shared_words: int, rings: list[tuple[int, int, int, np.ndarray]]):
        super().__init__(128, shared_words)
        self.rings, self.waits = rings, [0] * len(rings)
        self.arrivals: dict[int, int] = {}
        # Stages of activations that the tensor cores read, for each group in flight.
        self.groups: list[set[int]] = [set()]

    permute_bytes = staticmethod(Instructions.permute_bytes)
    merge = staticmethod(Instructions.merge)
    add_halves = staticmethod(Instructions.add_halves)
    byte_to_float = staticmethod(Instructions.byte_to_float)
    bfloat_to_float = staticmethod(Instructions.bfloat_to_float)

    @staticmethod
    def multiply_add_halves(a, b, c):
        a, b, c = (np.ascontiguousarray(x).view(np.float16).astype(np.float64) for x in (a, b, c))
        return (a * b + c).astype(np.float16).view(np.uint32)

    @classmethod
    def multiply_halves(cls, a, b):
        b = np.broadcast_to(np.asarray(b, np.uint32), a.shape)
        return cls.multiply_add_halves(a, b, np.zeros_like(a))

    @staticmethod
    def silu(x):
        return (x * expit(x.astype(np.float64))).astype(np.float32)

    def load_shared(self, address, offset=0, words=1):
        at = (np.asarray(address, np.int64) + offset) // 4
        return [self.shared[at + i] for i in range(words)]

    def loop(self, start, stop, step, carry, body):
        for index in range(start, stop, step):
            carry = body(np.uint32(index), carry)
        return carry

    def pin(self, registers):
        return registers

    def sync_warp(self):
        pass

    def wgmma_fence(self):
        pass

    def wgmma_commit(self):
        self.groups.append(set())

    def wgmma_wait(self, groups):
        self.groups = self.groups[-groups - 1 :]

    def barrier_wait(self, barrier, parity):
        for i, (full, stages, base, copies) in enumerate(self.rings):
            stage = (int(np.ravel(barrier)[0]) - full) // 8
            if 0 <= stage < stages:
                count = self.waits[i]
                assert (stage, int(parity)) == (count % stages, count // stages % 2)
                words = copies[count].reshape(-1)
                first = (base + stage * words.nbytes) // 4
                self.shared[first : first + words.size] = words
                self.waits[i] += 1
                return
        raise AssertionError("an unknown barrier")

    def barrier_arrive(self, barrier):
        if not self.active[-1].any():
            return
        place = int(np.ravel(barrier)[0])
        full, stages, *_ = self.rings[0]
        # Activations must not be replaced while the tensor cores read them.
        assert (place - full) // 8 - stages not in set().union(*self.groups)
        self.arrivals[place] = self.arrivals.get(place, 0) + int(self.active[-1].sum())

    @staticmethod
    def descriptor(address):
        return (np.uint32(address) & np.uint32(0x3FFFF)) >> np.uint32(4)

    def wgmma(self, acc, a, matrix):
        columns, (start,) = 2 * len(acc), {int(x) * 16 for x in np.ravel(matrix)}
        column, k = np.arange(columns), np.arange(16)[:, None]
        at = start + column // 8 * 1024 + column % 8 * 128 + 2 * k
        at ^= (at >> 7 & 7) << 4
        right = self.shared.view(np.float16)[at // 2].astype(np.float64)
        thread = np.arange(128)
        g, t, warp = thread % 32 // 4, thread % 4, thread // 32
        left = np.zeros((64, 16))
        for i, word in enumerate(a):
            pair = np.ascontiguousarray(word).view(np.float16).reshape(-1, 2)
            for o in range(2):
                left[16 * warp + g + 8 * (i % 2), 2 * t + o + 8 * (i // 2)] = pair[:, o]
        _, _, base, copies = self.rings[0]
        self.groups[-1].add((start - base) // copies[0].nbytes)
        product = left @ right
        rows = 16 * warp + g
        return [
            (acc[i] + product[rows + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * t + i % 2]).astype(
                np.float32
            )
            for i in range(len(acc))
        ]


def modelled(block, words, x, epilogue="none", tiles=None) -> np.ndarray:
    """Returns what the kernel stores for words [units, words], of all its consumers."""
    prepared = jax.tree.map(np.asarray, prefill_activations(jnp.asarray(x)))
    plan = Plan.of(prepared, words[None], block, epilogue, tiles or PrefillTiles(), 0)
    out = np.full((plan.rows, plan.outputs), np.nan, np.float32)
    slices_words, blocks_words, barrier_words = plan.shared_words
    blocks_at = slices_words * 4
    barriers = blocks_at + -(-blocks_words * 4 // 1024) * 1024
    stages = plan.tiles
    by_block = words.reshape(plan.units, plan.blocks, -1)
    for row_tile in range(plan.row_tiles):
        for first in range(0, plan.units, UNITS):
            units = np.minimum(first + np.arange(UNITS), plan.units - 1)
            block_full = barriers + 16 * stages.slices
            rings = [
                (barriers, stages.slices, 0, prepared.tiles[row_tile]),
                (block_full, stages.blocks, blocks_at, by_block[units].swapaxes(0, 1)),
            ]
            for group in (0, 1):
                isa = Warpgroup(barriers // 4 + barrier_words, rings)
                thread = isa.thread_index()
                memory, scales = isa.place(out), isa.place(prepared.scales)
                at = types.SimpleNamespace(
                    warp=(thread >> 5) + 4 * group,
                    lane=thread & 31,
                    slices=0,
                    blocks=blocks_at,
                    slice_full=barriers,
                    slice_empty=barriers + 8 * stages.slices,
                    block_full=block_full,
                    block_empty=block_full + 8 * stages.blocks,
                    first_unit=np.uint32(first),
                    scales=isa.offset_address(scales, row_tile, plan.tile * 4),
                    out=isa.offset_address(memory, row_tile, plan.tile * plan.outputs * 4),
                )
                consume(isa, plan, at)
                assert isa.waits == [4 * plan.blocks, plan.blocks]
                # Each of the four warps gives every stage back as often as it was filled, but the
                # last one, which nobody waits for.
                assert sum(isa.arrivals.values()) == 4 * (5 * plan.blocks - 1)
    return out


def _case(name, outputs, k, rows, seed=0):
    block = BLOCKS[name]
    planes = random_planes(block, outputs, k, size=1e-3)
    x = np.random.default_rng(seed).normal(size=(rows, k)).astype(np.float32)
    x[:, [3, 200]] *= 1000
    x[1] *= 1e5
    return block, planes, x


def relative_errors(got, want):
    """Returns each row's relative RMS error."""
    return np.sqrt(np.mean((got - want) ** 2, axis=1) / np.mean(want**2, axis=1))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_warpgroup_multiplies_what_the_format_unpacks(name):
    block, planes, x = _case(name, 144, 512, 70)
    words = np.asarray(block.tile(planes))
    got = modelled(block, words, x)
    matrix = np.asarray(block.format.unpack(planes), np.float64)
    want = x.astype(np.float64) @ matrix.T
    assert got.shape == (128, 144) and not got[70:].any()
    assert relative_errors(got[:70], want).max() < 1e-3


def test_a_long_sum_goes_round_both_rings():
    block, planes, x = _case("q4_k", 16, 1280, 8)
    got = modelled(block, np.asarray(block.tile(planes)), x, tiles=PrefillTiles(slices=3, blocks=2))
    want = x.astype(np.float64) @ np.asarray(block.format.unpack(planes), np.float64).T
    assert relative_errors(got[:8], want).max() < 1e-3


def test_gates_and_what_they_multiply_become_one():
    block, planes, x = _case("q4_k", 48, 256, 8)
    x[:, [3, 200]] /= 1000
    x[1] /= 1e5
    got = modelled(block, np.asarray(block.tile(planes)), x, "silu_gate")[:8]
    both = x.astype(np.float64) @ np.asarray(block.format.unpack(planes), np.float64).T
    gate, up = np.split(both.reshape(8, 3, 16), 2, axis=2)
    want = (gate * expit(gate) * up).reshape(8, 24)
    assert relative_errors(got, want).max() < 2e-3


def _operands(block, rows=300, k=512, outputs=144):
    x = jax.eval_shape(prefill_activations, jax.ShapeDtypeStruct((rows, k), jnp.float32))
    weights = jax.ShapeDtypeStruct((2, outputs // 16, k // 256 * block.words), jnp.uint32)
    return x, weights, jax.ShapeDtypeStruct((1,), jnp.int32)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("q4_k", 300), ("q6_k", 64), ("q8_0", 2048), ("iq4_xs", 300), ("q4_0", 64), ("nvfp4", 64)],
)
def test_a_product_lowers_for_a_gpu_on_a_host_without_one(name, rows):
    run = functools.partial(prefill_product, block=BLOCKS[name])
    operands = _operands(BLOCKS[name], rows)
    lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
    assert f"prefill_product_{name}_kernel" in lowered.as_text()
    assert lowered.out_info.shape == ({300: 512, 64: 64, 2048: 2048}[rows], 144)


def _shape(operands, **options: Any):
    block = options.pop("block", BLOCKS["q4_k"])
    return jax.eval_shape(functools.partial(prefill_product, block=block, **options), *operands)


def test_what_does_not_fit_is_refused():
    operands = _operands(BLOCKS["q4_k"])
    with pytest.raises(ValueError, match="do not hold K=512"):
        _shape(operands, block=BLOCKS["q6_k"])
    with pytest.raises(ValueError, match="multiple of 16 below 144"):
        _shape(operands, first=8)
    with pytest.raises(ValueError, match="'none' or 'silu_gate'"):
        _shape(operands, epilogue="gelu")
    with pytest.raises(ValueError, match="shared memory exceed"):
        _shape(operands, tiles=PrefillTiles(slices=9))
    with pytest.raises(ValueError, match="at least 2"):
        PrefillTiles(blocks=1)
    with pytest.raises(ValueError, match="multiple of 256"):
        prefill_activations(jnp.zeros((8, 128)))


def test_every_kind_of_block_has_dense_weights():
    assert DENSE_BLOCKS.keys() == BLOCKS.keys()


SIZES = [(512, 5120), (1040, 17408), (144, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    ("name", "outputs", "k", "rows"),
    [
        (name, *size, rows)
        for name in BLOCKS
        for size in SIZES
        for rows in (8, 64, 100, 300, 2048)
        # A part alone of what the figures do not name, which keeps the sweep short.
        if name in MEASURED or (size, rows) in ((SIZES[0], 300), (SIZES[2], 64))
    ],
)
def test_a_product_is_right_and_its_rows_stand_alone(name, outputs, k, rows, outliers):
    block = BLOCKS[name]
    planes = jax.tree.map(jnp.asarray, random_planes(block, outputs, k, size=1e-3))
    words = jnp.stack([jnp.zeros_like(block.tile(planes)), block.tile(planes)])
    layer = jnp.ones((1,), jnp.int32)
    run = jax.jit(lambda x: prefill_product(prefill_activations(x), words, layer, block))
    x = jax.random.normal(jax.random.key(0), (rows, k))
    x = x.at[:, 7].multiply(1000) if outliers else x
    got = run(x)
    want = np.asarray(jnp.matmul(x, block.format.unpack(planes).T, precision="highest"))
    assert (
        relative_errors(np.asarray(got, np.float64)[:rows], want.astype(np.float64)).max() < 2.5e-3
    )
    assert jnp.array_equal(run(x.at[1:].set(0))[0], got[0]) and jnp.array_equal(run(x), got)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_gates_and_left_out_rows_on_the_card(name):
    block = BLOCKS[name]
    planes = jax.tree.map(jnp.asarray, random_planes(block, 528, 1024, size=1e-3))
    words, layer = block.tile(planes)[None], jnp.zeros((1,), jnp.int32)
    x = jax.random.normal(jax.random.key(0), (600, 1024))
    prepared = jax.jit(prefill_activations)(x)
    whole = jax.jit(lambda x: prefill_product(x, words, layer, block))(prepared)
    part = jax.jit(lambda x: prefill_product(x, words, layer, block, first=48))(prepared)
    assert jnp.array_equal(whole[:, 48:], part)
    gated = jax.jit(lambda x: prefill_product(x, words, layer, block, "silu_gate"))(prepared)
    gate, up = np.split(np.asarray(whole, np.float64).reshape(768, -1, 16), 2, axis=2)
    want = (gate * expit(gate) * up).reshape(768, -1)
    assert relative_errors(np.asarray(gated, np.float64)[:600], want[:600]).max() < 1e-5
