"""What comes before a product of many rows, in one launch: residual add, RMSNorm, and float16.

One block of threads a row. A thread takes 16 elements at a time and stores them as the two pieces
of eight float16 that `prefill_product` reads. A row's numbers depend on that row alone.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.decode_inputs import over_row, power_of_two
from pallas_kernels.decode_words import WEIGHTS
from pallas_kernels.lane_kernel import lane_kernel
from pallas_kernels.prefill_product import SLICE, PrefillActivations, prefill_tile

_WARPS = 8
_RUN = 16
_TURN = _WARPS * 32 * _RUN
"""Elements that a block of threads takes at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillInputs:
    """A residual stream, and what the products of a layer make of it.

    Attributes:
      stream: float32 [R, K]: x, with `added` where there is one.
      normed: float32 [R, K]: the stream, normed where there is a norm; None where it is not wanted.
      activations: the normed rows as products read them.
    """

    stream: jax.Array
    normed: jax.Array | None
    activations: PrefillActivations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes.

    Attributes:
      rows: of x; later ones, up to a whole tile, are stored as zeros.
      k: elements of a row.
      tile: rows of a tile of `PrefillActivations`.
      eps: of the norm.
    """

    rows: int
    k: int
    tile: int
    eps: float
    warps: int = _WARPS

    @property
    def padded(self) -> int:
        """Rows in whole tiles."""
        return -(-self.rows // self.tile) * self.tile

    @property
    def turns(self) -> int:
        """Times that a thread takes 16 elements."""
        return -(-self.k // _TURN)


@functools.partial(jax.jit, static_argnames=("eps", "wants_normed"))
def prefill_inputs(
    x: Float[Array, "rows k"],
    *,
    added: Float[Array, "rows k"] | None = None,
    norm: Float[Array, "layers k"] | None = None,
    layer: Int[Array, "1"] | None = None,
    eps: float = 0.0,
    wants_normed: bool = False,
) -> PrefillInputs:
    """Returns the rows that a layer's products read, added, normed and prepared in one launch.

    Args:
      x: rows, K a multiple of 256.
      added: what the block before gives to the residual stream.
      norm: weights of an RMSNorm (Zhang, Sennrich 2019).
      layer: whose weights; with `norm`.
      eps: of the norm.
      wants_normed: whether the normed rows are wanted in float32 too.

    Raises:
      ValueError: K is not a multiple of 256, or a norm without its layer.
    """
    rows, k = x.shape
    if not k or k % WEIGHTS:
        raise ValueError(f"{k=} must be a positive multiple of {WEIGHTS}; pad the rows")
    if (norm is None) != (layer is None):
        raise ValueError("a norm and its layer come together")
    plan = Plan(rows=rows, k=k, tile=prefill_tile(rows), eps=eps)
    operands = {"x": x, "added": added, "norm": norm, "layer": layer}
    given = {name: operand for name, operand in operands.items() if operand is not None}
    tiles = (plan.padded // plan.tile, k // SLICE, plan.tile * 32)
    outputs = {
        "tiles": jax.ShapeDtypeStruct(tiles, jnp.uint32),
        "scales": jax.ShapeDtypeStruct((plan.padded,), jnp.float32),
    }
    if added is not None:
        outputs["stream"] = jax.ShapeDtypeStruct((rows, k), jnp.float32)
    if wants_normed and norm is not None:
        outputs["normed"] = jax.ShapeDtypeStruct((rows, k), jnp.float32)

    def run(*refs):
        *arrays, shared = refs
        places = dict(zip((*given, *outputs), map(ptx.global_address, arrays), strict=True))
        run_row(ptx, plan, places, ptx.shared_address(shared))

    results = lane_kernel(
        run,
        list(outputs.values()),
        name="prefill_inputs_kernel",
        grid=plan.padded,
        warpgroups=_WARPS // 4,
        shared=[256],
        portable=True,
    )(*given.values())
    found = dict(zip(outputs, results, strict=True))
    stream = found.get("stream", x)
    normed = found.get("normed", stream if norm is None else None)
    activations = PrefillActivations(tiles=found["tiles"], scales=found["scales"])
    return PrefillInputs(stream, normed, activations)


def run_row(isa, plan: Plan, places: dict[str, Any], shared) -> None:
    """Runs one thread of the kernel.

    Args:
      isa: instructions: `ptx`, or a model of them.
      plan: sizes.
      places: global addresses of the operands and results there are.
      shared: address of 64 words of shared memory.
    """
    row, first = isa.block_index(), isa.thread_index() * _RUN
    real = row < plan.rows
    at_row = isa.select(real, row, 0)
    starts = [first + turn * _TURN for turn in range(plan.turns)]
    insides = [start < plan.k for start in starts]
    starts = [isa.select(i, start, 0) for i, start in zip(insides, starts, strict=True)]
    row_of = {
        name: isa.offset_address(place, at_row, 4 * plan.k)
        for name, place in places.items()
        if name in ("x", "added", "stream", "normed")
    }
    if "norm" in places:
        (layer,) = isa.load_global(places["layer"])
        row_of["norm"] = isa.offset_address(places["norm"], layer, 4 * plan.k)

    def load(name: str) -> list[list[Any]]:
        runs = []
        for start in starts:
            at = isa.offset_address(row_of[name], start, 4)
            runs.append([x for i in range(4) for x in isa.load_global_floats(at, 16 * i, 4)])
        return runs

    def store(name: str, runs) -> None:
        for inside, start, run in zip(insides, starts, runs, strict=True):
            at = isa.offset_address(row_of[name], start, 4)
            with isa.when(inside), isa.when(real):
                for i in range(4):
                    isa.store_global(at, run[4 * i : 4 * i + 4], 16 * i)

    zero = isa.Float(0.0)
    runs = load("x")
    if "added" in places:
        runs = [
            [isa.sum_of(a, b) for a, b in zip(*pair, strict=True)]
            for pair in zip(runs, load("added"), strict=True)
        ]
        store("stream", runs)
    if "norm" in places:
        total = zero
        for inside, run in zip(insides, runs, strict=True):
            squares = functools.reduce(lambda sum, x: isa.fma(x, x, sum), run, zero)
            total = isa.sum_of(total, isa.select_float(inside, squares, zero))
        total = over_row(isa, plan.warps, total, isa.sum_of, shared)
        scale = isa.rsqrt(isa.fma(total, isa.Float(1 / plan.k), isa.Float(plan.eps)))
        runs = [
            [isa.product_of(isa.product_of(x, scale), w) for x, w in zip(*pair, strict=True)]
            for pair in zip(runs, load("norm"), strict=True)
        ]
        if "normed" in places:
            store("normed", runs)
    largest = zero
    for inside, run in zip(insides, runs, strict=True):
        most = functools.reduce(isa.maximum, (isa.magnitude(x) for x in run))
        largest = isa.maximum(largest, isa.select_float(inside, most, zero))
    largest = over_row(isa, plan.warps, largest, isa.maximum, shared + 4 * 32)
    factor, scale = power_of_two(isa, isa.select_float(real, largest, zero))
    factor = isa.select_float(real, factor, zero)
    with isa.when(isa.thread_index().equals(0)):
        isa.store_global(isa.offset_address(places["scales"], row, 4), [scale])
    for inside, start, run in zip(insides, starts, runs, strict=True):
        with isa.when(inside):
            _store_pieces(isa, plan, places["tiles"], row, start, run, factor)


def _store_pieces(isa, plan: Plan, tiles, row, start, run, factor) -> None:
    """Stores 16 elements of a row as two pieces; see `PrefillActivations.tiles`."""
    tile, inside = row // plan.tile, row % plan.tile
    at = isa.offset_address(tiles, tile * (plan.k // SLICE) + start // SLICE, plan.tile * 128)
    at = isa.offset_address(at, inside, 128)
    pair = start % SLICE // _RUN * 2
    for e in (0, 1):
        words = []
        for t in range(4):
            low, high = (isa.product_of(run[4 * t + 2 * e + o], factor) for o in (0, 1))
            words.append(isa.pack_halves(low, high))
        piece = (pair + e) ^ (inside & 7)
        isa.store_global(isa.offset_address(at, piece, 16), words)
