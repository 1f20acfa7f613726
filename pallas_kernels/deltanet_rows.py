"""What a prompt's DeltaNet layer does to each row by itself, for sm_90 GPUs.

One kernel makes rows of the delta rule from projected rows: convolution, SiLU, unit lengths. Keys
and queries become images (`split_tiles.py`) and values blocks, as the kernels after it copy them
to shared memory. Chunk 0 gets the pending rows. Another kernel norms and gates the outputs.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import ptx
from pallas_kernels.delta_rule import CHUNK, Rows
from pallas_kernels.deltanet_chunks import (
    KEYS,
    KEYS_BYTES,
    SPLITS,
    TAPS,
    THREADS,
    VALUES_BYTES,
    WIDTH,
    Plan,
    value_offset,
)
from pallas_kernels.lane_kernel import lane_kernel
from pallas_kernels.split_tiles import split

NORM_HEADS = 16
"""Outputs of one head at one row that a block norms: four a warp, whose loads overlap."""


def prepared_rows(
    plan: Plan,
    u: Float[Array, "rows _"],
    history: Float[Array, "taps channels"],
    conv: Float[Array, "layers channels taps"],
    pending: Rows,
    counts: Sequence[Int[Array, "1"]],
) -> tuple[UInt32[Array, "heads chunks _"], Float[Array, "blocks chunks _"]]:
    """Returns images of keys and queries, and values, of all chunks.

    Args:
      plan: sizes.
      u: projected rows, queries, keys and values in one.
      history: rows before the first one.
      conv: taps of the convolutions of all layers.
      pending: rows of the last cycle, of all layers.
      counts: layer, pending rows that were accepted, and live rows.
    """
    keys, values = plan.sizes.key_heads, plan.sizes.value_heads * SPLITS
    images, made = lane_kernel(
        functools.partial(rows_kernel, ptx, plan),
        [
            jax.ShapeDtypeStruct((keys, plan.chunks, KEYS_BYTES // 4), jnp.uint32),
            jax.ShapeDtypeStruct((values, plan.chunks, VALUES_BYTES // 4), jnp.float32),
        ],
        name="gdn_prefill_rows_kernel",
        grid=plan.chunks * plan.heads,
        warpgroups=THREADS // 128,
        shared=[16],
        follows=True,
        portable=True,
    )(u, history, conv, pending.q, pending.k, pending.v, *counts)
    return images, made


def gated_rows(
    plan: Plan,
    outs: Float[Array, "rows values"],
    z: Float[Array, "rows _"],
    norm: Float[Array, "layers width"],
    layer: Int[Array, "1"],
) -> Float[Array, "rows values"]:
    """Returns outputs normed head by head, times their gates.

    Args:
      plan: sizes.
      outs: of the scan.
      z: projected rows that hold the gates.
      norm: weights of all layers.
      layer: which.
    """
    return lane_kernel(
        functools.partial(norm_kernel, ptx, plan),
        jax.ShapeDtypeStruct(outs.shape, jnp.float32),
        name="gdn_prefill_norm_kernel",
        grid=plan.rows * plan.sizes.value_heads // NORM_HEADS,
        warpgroups=THREADS // 128,
        shared=[16],
        follows=True,
        portable=True,
    )(outs, z, norm, layer)


def _lane_sum(isa, value):
    for distance in (16, 8, 4, 2, 1):
        value = isa.sum_of(value, isa.shuffle_xor(value, distance))
    return value


class _Rows:
    """Where a thread is: a warp takes 16 rows of one head, a lane four of its channels."""

    def __init__(self, isa, plan: Plan, *refs):
        self.isa, self.plan = isa, plan
        *inputs, layer, num_pending, num_live, images, values, _ = refs
        addresses = [isa.global_address(ref) for ref in inputs]
        self.u, self.history, self.conv, self.q, self.k, self.v = addresses
        self.images, self.values = isa.global_address(images), isa.global_address(values)
        self.layer, self.num_pending, self.num_live = (
            isa.uniform(isa.load_global(isa.global_address(ref))[0])
            for ref in (layer, num_pending, num_live)
        )
        thread, block = isa.thread_index(), isa.block_index()
        self.lane, self.first = thread & 31, isa.uniform(thread >> 5) * 16
        # Neighbours read neighbouring channels of the same rows.
        self.chunk, self.slot = block // plan.heads, block % plan.heads
        keys = plan.sizes.key_heads
        self.is_query, self.is_key = self.slot < keys, self.slot < 2 * keys
        self.key_head = isa.select(self.is_query, self.slot, self.slot - keys)
        self.value_head = self.slot - 2 * keys
        self.channel = self.slot * WIDTH + self.lane * 4
        self.row_length, column = plan.columns.u
        self.u = isa.offset_address(self.u, self.channel + column, 4)

    def store_key(self, row, floats) -> None:
        """Stores a lane's channels of a query or key."""
        isa, plan = self.isa, self.plan
        index = self.key_head * plan.chunks + self.chunk
        place = KEYS.offset(row, self.lane * 4) + isa.select(self.is_query, KEYS.bytes, 0)
        image = isa.offset_address(self.images, index, KEYS_BYTES)
        address = isa.offset_address(image, place, 1)
        pairs = [split(isa, *floats[i : i + 2]) for i in (0, 2)]
        isa.store_global(address, [high for high, _ in pairs])
        isa.store_global(address, [low for _, low in pairs], KEYS.plane_bytes)

    def store_value(self, row, floats) -> None:
        """Stores a lane's channels of a value."""
        part = self.value_head * SPLITS + (self.lane >> 4)
        index = part * self.plan.chunks + self.chunk
        address = self.isa.offset_address(self.values, index, VALUES_BYTES)
        place = value_offset(row, (self.lane & 15) * 4)
        self.isa.store_global(self.isa.offset_address(address, place, 1), floats)

    def masked(self, is_live, floats):
        """Returns floats of a live row, zeros for others, whatever these hold."""
        return [self.isa.select_float(is_live, x, self.isa.Float(0.0)) for x in floats]


def rows_kernel(isa, plan: Plan, *refs) -> None:
    """Runs one thread of the kernel that makes queries, keys and values.

    Args:
      isa: instructions: `ptx`, or a model of them.
      plan: sizes.
      *refs: u, history, conv, pending q, k, v, layer, counts, results and shared memory.
    """
    at = _Rows(isa, plan, *refs)

    def keys():
        _convolve(at, lambda row, is_live, mixed: at.store_key(row, _unit(at, is_live, mixed)))

    def values():
        _convolve(at, lambda row, is_live, mixed: at.store_value(row, at.masked(is_live, mixed)))

    def live():
        isa.branch(at.is_key, keys, values)

    isa.branch(at.chunk.equals(0), lambda: _copy_pending(at), live)


def _unit(at: _Rows, is_live, mixed):
    """Returns channels of a query or key of unit length, the query scaled."""
    isa = at.isa
    squares = [isa.product_of(x, x) for x in mixed]
    total = isa.sum_of(isa.sum_of(*squares[:2]), isa.sum_of(*squares[2:]))
    scale = isa.rsqrt(isa.sum_of(_lane_sum(isa, total), isa.Float(at.plan.sizes.eps)))
    size = isa.select_float(at.is_query, isa.Float(WIDTH**-0.5), isa.Float(1.0))
    scale = isa.product_of(scale, size)
    return at.masked(is_live, [isa.product_of(x, scale) for x in mixed])


def _convolve(at: _Rows, store) -> None:
    """Calls `store(row of the chunk, whether it is live, activated channels)` for 16 rows."""
    isa, channels = at.isa, at.plan.sizes.channels
    first = (at.chunk - 1) * CHUNK + at.first
    taps_at = isa.offset_address(at.conv, at.layer * channels + at.channel, 4 * TAPS)
    taps = [isa.load_global_floats(taps_at, 4 * TAPS * i, TAPS) for i in range(4)]

    def input_of(row):
        return isa.offset_address(at.u, row, 4 * at.row_length)

    def before(distance: int):
        row = first + (TAPS - 1 - distance)
        old = isa.offset_address(at.history, row, 4 * channels)
        old = isa.offset_address(old, at.channel, 4)
        address = isa.select_address(row < TAPS - 1, old, input_of(first - distance))
        return isa.load_global_floats(address, 0, 4)

    def mixed_at(inputs, i: int):
        total = isa.product_of(taps[i][0], inputs[0][i])
        for tap in range(1, TAPS):
            total = isa.fma(taps[i][tap], inputs[tap][i], total)
        return isa.silu(total)

    def step(turn, past):
        start = first + turn * 4
        fresh = [isa.load_global_floats(input_of(start + i), 0, 4) for i in range(4)]
        inputs = [*past, *fresh]
        for row in range(4):
            mixed = [mixed_at(inputs[row : row + TAPS], i) for i in range(4)]
            store(at.first + turn * 4 + row, start + row < at.num_live, mixed)
        return inputs[-(TAPS - 1) :]

    isa.loop(0, 4, 1, [before(distance) for distance in (3, 2, 1)], step)


def _copy_pending(at: _Rows) -> None:
    isa, sizes, stack = at.isa, at.plan.sizes, at.plan.pending_rows
    limit = isa.select(at.num_pending < stack, at.num_pending, stack)

    def source(pointer, row, heads: int, head):
        index = (at.layer * stack + row) * heads + head
        address = isa.offset_address(pointer, index, 4 * WIDTH)
        return isa.offset_address(address, at.lane, 16)

    def copy(index, carry):
        row = at.first + index
        there, is_live = isa.select(row < stack, row, 0), row < limit

        def keys():
            query, key = (source(p, there, sizes.key_heads, at.key_head) for p in (at.q, at.k))
            address = isa.select_address(at.is_query, query, key)
            at.store_key(row, at.masked(is_live, isa.load_global_floats(address, 0, 4)))

        def values():
            address = source(at.v, there, sizes.value_heads, at.value_head)
            at.store_value(row, at.masked(is_live, isa.load_global_floats(address, 0, 4)))

        isa.branch(at.is_key, keys, values)
        return carry

    isa.loop(0, 16, 1, [], copy)


def norm_kernel(isa, plan: Plan, *refs) -> None:
    """Runs one thread of the kernel that norms and gates outputs, a warp each of a head at a row.

    Args:
      isa: instructions: `ptx`, or a model of them.
      plan: sizes.
      *refs: outputs of the scan, z, norm, layer, result and shared memory.
    """
    outs, z, norm, layer, result, _ = refs
    outs, z, norm, result = (isa.global_address(ref) for ref in (outs, z, norm, result))
    layer = isa.uniform(isa.load_global(isa.global_address(layer))[0])
    thread, sizes = isa.thread_index(), plan.sizes
    lane, warp = thread & 31, isa.uniform(thread >> 5)
    count = NORM_HEADS // (THREADS // 32)
    # A lane takes four values at once: with fewer under way the kernel waits for memory.
    weights = isa.load_global_floats(isa.offset_address(norm, layer * 32 + lane, 16), 0, 4)
    first = isa.block_index() * NORM_HEADS + warp * count
    length, column = plan.columns.z
    wide = length % 4 == 0 and column % 4 == 0
    items, loaded = [first + i for i in range(count)], []
    for item in items:
        row, head = item // sizes.value_heads, item % sizes.value_heads
        gate_at = isa.offset_address(z, row * length + head * WIDTH + lane * 4 + column, 4)
        gates = (
            isa.load_global_floats(gate_at, 0, 4)
            if wide
            else [isa.load_global_floats(gate_at, 4 * i)[0] for i in range(4)]
        )
        out_at = isa.offset_address(outs, item * 32 + lane, 16)
        loaded.append((isa.load_global_floats(out_at, 0, 4), gates))
    nonlinearity = isa.silu if sizes.gate == "silu" else isa.sigmoid
    for item, (values, gates) in zip(items, loaded, strict=True):
        squares = [isa.product_of(value, value) for value in values]
        total = isa.sum_of(isa.sum_of(*squares[:2]), isa.sum_of(*squares[2:]))
        mean = isa.product_of(_lane_sum(isa, total), isa.Float(1 / WIDTH))
        scale = isa.rsqrt(isa.sum_of(mean, isa.Float(sizes.eps)))
        results = []
        for value, gate, weight in zip(values, gates, weights, strict=True):
            normed = isa.product_of(isa.product_of(value, scale), weight)
            results.append(isa.product_of(normed, nonlinearity(gate)))
        isa.store_global(isa.offset_address(result, item * 32 + lane, 16), results)
