"""What comes before a decode product, in one launch: residual add, RMSNorm, and `prepare`.

One block of threads a row, one warp a block of 256 activations: lane 4 r + t owns elements 4t..4t+3
and 16+4t..16+4t+3 of run r, which are its quad's share of a matrix fragment. A row's numbers depend
on that row alone.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ptx
from pallas_kernels.decode_activations import Activations, operand_words, prepare
from pallas_kernels.decode_words import WEIGHTS, Block
from pallas_kernels.lane_kernel import lane_kernel

_MOST_WARPS = 32
_VALUE_WORDS = 128
"""Words of a row's own values in a block of its operand."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A residual stream, and what the products of a layer make of it.

    Attributes:
      stream: float32 [R, K]: x, with `added` where there is one.
      normed: float32 [R, K]: `stream / sqrt(mean(stream^2) + eps) * norm`, or the stream itself.
      activations: the normed rows as products read them.
      also: the same for another kind of block, None where there is none.
    """

    stream: jax.Array
    normed: jax.Array
    activations: Activations
    also: Activations | None = None


def decode_inputs_reference(
    x: jax.Array,
    block: Block,
    *,
    added: jax.Array | None = None,
    norm: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    also: Block | None = None,
) -> Inputs:
    """Returns what `decode_inputs` does, in plain JAX."""
    stream = x if added is None else x + added
    normed = stream
    if norm is not None:
        assert layer is not None
        scale = jax.lax.rsqrt(jnp.mean(stream * stream, -1, keepdims=True) + eps)
        normed = stream * scale * norm[layer[0]][None]
    other = None if also is None else prepare(normed, also)
    return Inputs(stream, normed, prepare(normed, block), other)


@functools.partial(jax.jit, static_argnames=("block", "also", "eps"))
def decode_inputs(
    x: jax.Array,
    block: Block,
    *,
    added: jax.Array | None = None,
    norm: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 0.0,
    also: Block | None = None,
) -> Inputs:
    """Returns the rows that a layer's products read, added, normed and prepared in one launch.

    Args:
      x: float32 [R, K], R = 8 or 16, K a multiple of 256.
      block: kind of block that the products multiply with.
      added: float32 [R, K], what the block before gives to the residual stream.
      norm: float32 [layers, K], weights of an RMSNorm (Zhang, Sennrich 2019).
      layer: int32 [1], whose weights; with `norm`.
      eps: of the norm.
      also: another kind of block, where products of both kinds read the rows.

    Raises:
      ValueError: sizes that no block has.
    """
    rows, k = x.shape
    if rows not in (8, 16) or k % WEIGHTS or not k:
        raise ValueError(f"{rows=} must be 8 or 16, and {k=} a multiple of {WEIGHTS}; pad them")
    if (norm is None) != (layer is None):
        raise ValueError("a norm and its layer come together")
    plan = _Plan(block=block, also=also, rows=rows, blocks=k // WEIGHTS, eps=eps)
    operands = {"x": x, "added": added, "norm": norm, "layer": layer}
    names = [name for name, operand in operands.items() if operand is not None]
    outputs = {
        name: jax.ShapeDtypeStruct((plan.blocks, operand_words(kind, rows)), jnp.uint32)
        for name, kind in plan.operands
    }
    outputs["scales"] = jax.ShapeDtypeStruct((rows,), jnp.float32)
    if added is not None:
        outputs["stream"] = jax.ShapeDtypeStruct((rows, k), jnp.float32)
    if norm is not None:
        outputs["normed"] = jax.ShapeDtypeStruct((rows, k), jnp.float32)

    def run(*refs):
        *arrays, shared = refs
        places = dict(zip((*names, *outputs), map(ptx.global_address, arrays), strict=True))
        run_row(ptx, plan, places, ptx.shared_address(shared), ptx.block_index())

    results = lane_kernel(
        run,
        list(outputs.values()),
        name="decode_inputs_kernel",
        grid=rows,
        warpgroups=plan.warps // 4,
        shared=[8 * _MOST_WARPS],
        follows=True,
        portable=True,
    )(*(operand for operand in operands.values() if operand is not None))
    found = dict(zip(outputs, results, strict=True))
    stream = found.get("stream", x)
    made = [
        Activations(blocks=found[name], scales=found["scales"], operand=kind.operand)
        for name, kind in plan.operands
    ]
    return Inputs(stream, found.get("normed", stream), *made)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Static sizes."""

    block: Block
    rows: int
    blocks: int
    eps: float
    also: Block | None = None

    @property
    def operands(self) -> list[tuple[str, Block]]:
        """Names of the results that hold activations, and the kinds of block they are for."""
        kinds = [("blocks", self.block), ("blocks_also", self.also)]
        return [(name, kind) for name, kind in kinds if kind is not None]

    @property
    def turns(self) -> int:
        """Blocks of 256 activations that a warp takes."""
        return -(-self.blocks // _MOST_WARPS)

    @property
    def warps(self) -> int:
        """Warps of a block of threads, in whole warpgroups."""
        return -(-self.blocks // (4 * self.turns)) * 4


def run_row(isa, plan: _Plan, places: dict[str, Any], shared, row) -> None:
    """Emits the whole work of one block of threads.

    Args:
      isa: `ptx`, or a model of it.
      plan: static sizes.
      places: global addresses of the operands and results there are.
      shared: address of 64 words of shared memory.
      row: index of the row.
    """
    thread = isa.thread_index()
    warp, lane = thread >> 5, thread & 31
    width = plan.blocks * WEIGHTS * 4
    in_lane = (lane >> 2) * 128 + (lane & 3) * 16  # byte of the lane's first element in a block
    row_of = {
        name: isa.offset_address(places[name], row, width)
        for name in ("x", "added", "stream", "normed")
        if name in places
    }
    if "norm" in places:
        layer = isa.load_global_coherent(places["layer"])
        row_of["norm"] = isa.offset_address(places["norm"], layer, width)
    turns = []
    for turn in range(plan.turns):
        index = warp + turn * plan.warps
        inside = index < plan.blocks
        turns.append((inside, isa.select(inside, index, 0)))

    def load(name, index):
        at = isa.offset_address(row_of[name], index * (WEIGHTS * 4) + in_lane, 1)
        return [value for half in (0, 64) for value in isa.load_global_floats(at, half, 4)]

    def store(name, index, values):
        at = isa.offset_address(row_of[name], index * (WEIGHTS * 4) + in_lane, 1)
        for half in (0, 1):
            isa.store_global(at, values[4 * half : 4 * half + 4], 64 * half)

    loaded = [load("x", index) for _, index in turns]
    if "added" in places:
        others = [load("added", index) for _, index in turns]
        loaded = [
            [a + b for a, b in zip(*pair, strict=True)] for pair in zip(loaded, others, strict=True)
        ]
        for (inside, index), values in zip(turns, loaded, strict=True):
            with isa.when(inside):
                store("stream", index, values)
    if "norm" in places:
        weights = [load("norm", index) for _, index in turns]
        total = isa.Float(0.0)
        for (inside, _), values in zip(turns, loaded, strict=True):
            squares = functools.reduce(lambda sum, x: isa.fma(x, x, sum), values, isa.Float(0.0))
            total = total + isa.select_float(inside, squares, isa.Float(0.0))
        total = over_row(isa, plan.warps, total, lambda a, b: a + b, shared)
        scale = isa.rsqrt(
            isa.fma(total, isa.Float(1 / (plan.blocks * WEIGHTS)), isa.Float(plan.eps))
        )
        loaded = [
            [x * scale * w for x, w in zip(*pair, strict=True)]
            for pair in zip(loaded, weights, strict=True)
        ]
        for (inside, index), values in zip(turns, loaded, strict=True):
            with isa.when(inside):
                store("normed", index, values)
    largest = isa.Float(0.0)
    for (inside, _), values in zip(turns, loaded, strict=True):
        most = functools.reduce(isa.maximum, (isa.magnitude(x) for x in values))
        largest = isa.maximum(largest, isa.select_float(inside, most, isa.Float(0.0)))
    largest = over_row(isa, plan.warps, largest, isa.maximum, shared + 4 * _MOST_WARPS)
    factor, scale = power_of_two(isa, largest)
    isa.store_global(isa.offset_address(places["scales"], row, 4), [scale])
    for (inside, index), values in zip(turns, loaded, strict=True):
        for name, kind in plan.operands:
            at = (places[name], index, row, inside)
            _store_operand(isa, kind, plan.rows, *at, values, factor)


def over_row(isa, warps: int, value, combine, shared):
    """Returns a value combined over all threads of a block, in a fixed order.

    Args:
      isa: `ptx`, or a model of it.
      warps: of the block, at most 32.
      value: of each thread.
      combine: of two values; 0 must be neutral.
      shared: address of 32 words of shared memory, used once.
    """

    def over_warp(value):
        for distance in (16, 8, 4, 2, 1):
            value = combine(value, isa.shuffle_xor(value, distance))
        return value

    thread = isa.thread_index()
    lane = thread & 31
    isa.store_shared(shared + (thread >> 5) * 4, [over_warp(value)])
    isa.sync_threads(0, 32 * warps)
    (found,) = isa.load_shared_floats(shared + lane * 4)
    return over_warp(isa.select_float(lane < warps, found, isa.Float(0.0)))


def power_of_two(isa, largest):
    """Returns the power of two that brings this magnitude to 16..32, and its inverse."""
    exponent = isa.as_word(largest) >> 23
    # Both powers are normal numbers; a row of zeros stays one.
    exponent = isa.select(exponent < 5, 5, isa.select(exponent < 254, exponent, 253))
    return isa.as_float((258 - exponent) << 23), isa.as_float((exponent - 4) << 23)


def _store_operand(
    isa, block: Block, rows: int, blocks, index, row, inside, values, factor
) -> None:
    """Stores a lane's part of a block of the operand; see `Activations.blocks`."""
    tiles = rows // 8
    lane = isa.thread_index() & 31
    run, t, g, tile = lane >> 2, lane & 3, row & 7, row >> 3
    at = isa.offset_address(blocks, index, operand_words(block, rows) * 4)
    sixteenth = factor * isa.Float(1 / 16)
    words, sums = [], []
    for half in (0, 1):
        for e, times in enumerate((factor, sixteenth)):
            first = 4 * half + 2 * e
            word = isa.pack_halves(values[first] * times, values[first + 1] * times)
            words.append(word)
            sum_ = isa.half_to_float(word, False) + isa.half_to_float(word, True)
            for distance in (1, 2):
                sum_ = sum_ + isa.shuffle_xor(sum_, distance)
            sums.append(sum_)
    values_at = ((run * tiles + tile) * _VALUE_WORDS + (g * 4 + t) * 4) * 4
    plain, divided = (isa.Float(weight) for weight in block.offset_weights)
    per_half = [isa.fma(sums[i], plain, sums[i + 1] * divided) for i in (0, 2)]
    lane_of_row = g * 4 + t
    offset_words = block.num_offsets // 4
    offsets_at = tiles * 4096 + (tile * 32 + lane_of_row) * (offset_words * 4)
    sums_at = tiles * (4096 + 128 * offset_words) + (tile * 32 + lane_of_row) * 8
    # Quad 0 stores for its row: lane t has the sums of runs 2t and 2t + 1, or of t and t + 4.
    if block.num_offsets == 8:
        run_sum = per_half[0] + per_half[1]
        pairs = [[isa.shuffle(run_sum, t * 8 + 4 * i) for i in (0, 1)]]
    else:
        pairs = [[isa.shuffle(half, t * 4 + 16 * i) for half in per_half] for i in (0, 1)]
    offsets = _high_and_low(isa, pairs)
    mins = []
    if block.has_mins:
        sixteen = isa.Float(16.0)
        wholes = [isa.fma(sums[i + 1], sixteen, sums[i]) for i in (0, 2)]
        whole = wholes[0] + wholes[1]
        mins = _high_and_low(isa, [[isa.shuffle(whole, t * 8 + 4 * i) for i in (0, 1)]])
    with isa.when(inside):
        isa.store_global(isa.offset_address(at, values_at, 1), words)
        with isa.when(lane < 4):
            isa.store_global(isa.offset_address(at, offsets_at, 1), offsets)
            if mins:
                isa.store_global(isa.offset_address(at, sums_at, 1), mins)


def _high_and_low(isa, pairs) -> list[Any]:
    """Returns words of the high parts of pairs, then of their low parts, as float16."""
    high = [isa.pack_halves(*pair) for pair in pairs]
    low = [
        isa.pack_halves(
            pair[0] - isa.half_to_float(word, False), pair[1] - isa.half_to_float(word, True)
        )
        for pair, word in zip(pairs, high, strict=True)
    ]
    return [*high, *low]
