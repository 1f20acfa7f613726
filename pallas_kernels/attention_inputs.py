"""Between a layer's projections and its attention, in one launch: norms, rotation, new cache rows.

A warp takes one head of one row: lane l has elements 4l..4l+3 and 128+4l..128+4l+3, so that the
partner of a rotated element is in the lane whose index differs by one bit, and eight lanes hold a
group of a q8_0 cache. A row's numbers depend on that row alone.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.attention_chunks import ROWS
from pallas_kernels.attention_panels import WIDTH
from pallas_kernels.cached_rows import CachedRows, Q8Rows
from pallas_kernels.lane_kernel import lane_kernel

_WARPS = 4
_LARGEST = 127.0
_ROUNDS = 12582912.0
"""1.5 x 2^23: added to a small number, it leaves the nearest integer in the low bits."""

PAIRS = (4, 8, 16, 32, 64)
"""Numbers of rotated pairs that lie in lanes one bit apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes.

    Attributes:
      heads, kv_heads: query and KV heads.
      columns: of queries, keys and values: length of their matrix's rows, and the first column.
      distance: columns from one query head to the next.
      pairs: rotated pairs of a head, one of `PAIRS`.
      capacity: positions of the cache.
      eps: of the norms.
      quantized: whether the cache is in q8_0, else in bfloat16.
    """

    heads: int
    kv_heads: int
    columns: tuple[tuple[int, int], ...]
    distance: int
    pairs: int
    capacity: int
    eps: float
    quantized: bool

    @property
    def units(self) -> int:
        """Heads of a row that a warp takes: of queries, then of keys, then of values."""
        return self.heads + 2 * self.kv_heads

    @property
    def blocks(self) -> int:
        """Blocks of threads of a row."""
        return -(-self.units // _WARPS)


def fits(heads: int, k: CachedRows, pairs: int, rows: int) -> bool:
    """Returns whether the kernel takes these sizes and this format of a cache.

    Args:
      heads: query heads.
      k: cached keys.
      pairs: rotated pairs of a head.
      rows: of the cycle.
    """
    *_, kv_heads, width = k.shape
    known = isinstance(k, Q8Rows) or k.dtype == jnp.bfloat16
    return known and rows == ROWS and width == WIDTH and pairs in PAIRS and heads % kv_heads == 0


@functools.partial(jax.jit, static_argnames=("heads", "first", "eps"))
def attn_inputs(
    projected: Sequence[Float[Array, "rows _"]],
    norms: Sequence[Float[Array, "layers width"]],
    rotation: Sequence[Float[Array, "rows pairs"]],
    cache: tuple[CachedRows, CachedRows],
    layer: Int[Array, ""],
    positions: Int[Array, " rows"],
    *,
    heads: int,
    first: tuple[int, int, int],
    eps: float,
) -> tuple[Float[Array, "rows heads width"], tuple[CachedRows, CachedRows]]:
    """Returns queries, and the cache with the rows' keys and values, written in place.

    Queries and keys are RMS-normed (Zhang, Sennrich 2019) and their first elements rotated (Su et
    al., 2021; `layers.rotate`); values go to the cache as they are.

    Args:
      projected: matrices that hold queries, each head followed by its gate, keys, and values.
      norms: weights of queries and of keys, of all layers.
      rotation: cosine and sine of each row and pair.
      cache: keys and values of all layers, [layers, capacity, kv_heads, width], see `fits`.
      layer: which.
      positions: of each row; rows at -1 leave the cache alone.
      heads: query heads.
      first: the column where queries, keys and values begin in their matrix.
      eps: of the norms.

    Raises:
      ValueError: sizes that the kernel does not take.
    """
    k, _ = cache
    (rows, pairs), (_, capacity, kv_heads, _) = rotation[0].shape, k.shape
    if not fits(heads, k, pairs, rows):
        raise ValueError(
            f"{rows=} must be {ROWS}, {pairs=} one of {PAIRS}, {k.shape=} of width {WIDTH} in "
            "bfloat16 or q8_0; use the reference"
        )
    lengths = (matrix.shape[1] for matrix in projected)
    plan = Plan(
        heads=heads,
        kv_heads=kv_heads,
        columns=tuple(zip(lengths, first, strict=True)),
        distance=2 * WIDTH,
        pairs=pairs,
        capacity=capacity,
        eps=eps,
        quantized=isinstance(k, Q8Rows),
    )

    planes, tree = jax.tree.flatten(cache)
    stacks = [jax.new_ref(plane) for plane in planes]
    counts = (positions + 1).astype(jnp.int32)
    q = lane_kernel(
        functools.partial(run_warp, ptx, plan),
        jax.ShapeDtypeStruct((ROWS, heads, WIDTH), jnp.float32),
        name="attn_inputs_kernel",
        grid=ROWS * plan.blocks,
        warpgroups=_WARPS // 4,
        follows=True,
        portable=True,
    )(*projected, *norms, *rotation, counts, jnp.reshape(layer, 1), *stacks)
    return q, jax.tree.unflatten(tree, [jax.freeze(stack) for stack in stacks])


def run_warp(isa, plan: Plan, *refs) -> None:
    """Runs one thread of the kernel.

    Args:
      isa: instructions: `ptx`, or a model of them.
      plan: sizes.
      *refs: projected queries, keys, values; norms of queries, keys; cosine, sine; counts, layer;
        the cache's planes; queries.
    """
    *projected, q_norm, k_norm, cosine, sine, counts, layer = refs[:9]
    *cache, out = refs[9:]
    thread = isa.thread_index()
    warp, lane = isa.uniform(thread >> 5), thread & 31
    row, index = isa.block_index() // plan.blocks, isa.block_index() % plan.blocks * _WARPS + warp
    inside = index < plan.units
    unit = isa.select(inside, index, 0)
    is_query, is_key = unit < plan.heads, unit < plan.heads + plan.kv_heads
    key = unit - plan.heads
    head = isa.select(is_query, unit, isa.select(is_key, key, key - plan.kv_heads))
    distances = plan.distance, WIDTH, WIDTH
    places = []
    for ref, (length, first), distance in zip(projected, plan.columns, distances, strict=True):
        column = head * distance + first + lane * 4
        places.append(isa.offset_address(isa.global_address(ref), row * length + column, 4))

    def by_kind(query, key, value):
        return isa.select_address(is_query, query, isa.select_address(is_key, key, value))

    loaded = _halves(isa, by_kind(*places))
    (index_of_layer,) = isa.load_global(isa.global_address(layer))
    (count,) = isa.load_global(isa.offset_address(isa.global_address(counts), row, 4))
    weights = [
        isa.offset_address(isa.global_address(ref), index_of_layer * WIDTH + lane * 4, 4)
        for ref in (q_norm, k_norm)
    ]
    turned = _normed(isa, plan, loaded, _halves(isa, by_kind(weights[0], weights[1], weights[1])))
    turned = _rotated(isa, plan, turned, row, lane, (cosine, sine))
    values = [isa.select_float(is_key, new, old) for new, old in zip(turned, loaded, strict=True)]
    with isa.when(inside):
        with isa.when(is_query):
            at = (row * plan.heads + head) * WIDTH + lane * 4
            at = isa.offset_address(isa.global_address(out), at, 4)
            for half in (0, 1):
                isa.store_global(at, values[4 * half : 4 * half + 4], 512 * half)
        written = isa.select(is_query, 0, count)
        place = (index_of_layer * plan.capacity + count - 1) * plan.kv_heads + head
        planes = [isa.global_address(ref) for ref in cache]
        pairs = zip(planes[: len(planes) // 2], planes[len(planes) // 2 :], strict=True)
        chosen = [isa.select_address(is_key, *pair) for pair in pairs]
        store = _store_quantized if plan.quantized else _store_bfloats
        store(isa, chosen, isa.Word(0) < written, place, lane, values)


def _halves(isa, address) -> list[Any]:
    """Returns a lane's eight elements."""
    return [x for half in (0, 512) for x in isa.load_global_floats(address, half, 4)]


def _normed(isa, plan: Plan, values, weights) -> list[Any]:
    total = functools.reduce(lambda sum, x: isa.fma(x, x, sum), values, isa.Float(0.0))
    for distance in (16, 8, 4, 2, 1):
        total = isa.sum_of(total, isa.shuffle_xor(total, distance))
    scale = isa.rsqrt(isa.fma(total, isa.Float(1 / WIDTH), isa.Float(plan.eps)))
    return [
        isa.product_of(isa.product_of(x, scale), w) for x, w in zip(values, weights, strict=True)
    ]


def _rotated(isa, plan: Plan, values, row, lane, tables) -> list[Any]:
    """Returns a lane's elements, those of rotated pairs turned together with their partners."""
    lanes = plan.pairs // 4
    at = row * plan.pairs + (lane & (lanes - 1)) * 4
    cosine, sine = (
        isa.load_global_floats(isa.offset_address(isa.global_address(table), at, 4), 0, 4)
        for table in tables
    )
    is_left, is_turned = lane < lanes, lane < 2 * lanes
    first = []
    for x, c, s in zip(values[:4], cosine, sine, strict=True):
        partner = isa.shuffle_xor(x, lanes)
        partner = isa.select_float(is_left, -partner, partner)
        turned = isa.fma(x, c, isa.product_of(partner, s))
        first.append(isa.select_float(is_turned, turned, x))
    return [*first, *values[4:]]


def _store_bfloats(isa, planes, written, place, lane, values) -> None:
    (plane,) = planes
    at = isa.offset_address(isa.offset_address(plane, place, 2 * WIDTH), lane, 8)
    with isa.when(written):
        for half in (0, 1):
            four = values[4 * half : 4 * half + 4]
            words = [isa.pack_bfloats(*four[i : i + 2]) for i in (0, 2)]
            isa.store_global(at, words, WIDTH * half)


def _store_quantized(isa, planes, written, place, lane, values) -> None:
    """Stores codes and scales as `cached_rows.quantized` makes them."""
    codes, scales = planes
    codes_at = isa.offset_address(isa.offset_address(codes, place, WIDTH), lane, 4)
    scales_at = isa.offset_address(isa.offset_address(scales, place, WIDTH // 16), lane >> 4, 4)
    for half in (0, 1):
        four = values[4 * half : 4 * half + 4]
        largest = functools.reduce(isa.maximum, (isa.magnitude(x) for x in four))
        for distance in (4, 2, 1):
            largest = isa.maximum(largest, isa.shuffle_xor(largest, distance))
        zero = isa.Float(0.0)
        rounded = isa.pack_bfloats(isa.divide(largest, isa.Float(_LARGEST)), zero)
        scale = isa.bfloat_to_float(rounded, False)
        divisor = isa.select_float(rounded.equals(0), isa.Float(1.0), scale)
        word = isa.Word(0)
        for i, x in enumerate(four):
            ratio = isa.maximum(isa.divide(x, divisor), isa.Float(-_LARGEST))
            ratio = -isa.maximum(-ratio, isa.Float(-_LARGEST))
            code = isa.as_word(isa.sum_of(ratio, isa.Float(_ROUNDS))) & 255
            word = word | code << 8 * i
        both = isa.pack_bfloats(scale, isa.shuffle_xor(scale, 8))
        with isa.when(written):
            isa.store_global(codes_at, [word], WIDTH // 2 * half)
            with isa.when((lane & 15).equals(0)):
                isa.store_global(scales_at, [both], WIDTH // 32 * half)
