"""Attention of a cycle's rows against a long cache, for sm_90 GPUs: every key is read once.

The cache is cut into chunks at fixed positions, short ones first. A block of threads takes one
chunk of one KV head: all rows of all query heads that read it stand in the rows of one matrix, 16
to a warp, so keys and values go through the tensor cores as they lie in the cache. Warps share a
tile of positions, and merge at the end of the chunk; a second kernel merges the chunks in order,
and gates. What a row sees, and in which order it is summed, follows from its position alone.

Softmax is online and in float32; how a cache's format enters the products: `attention_tiles`.
FlashAttention-2 (Dao, 2023) and Flash-Decoding (Dao et al., 2023).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.attention_tiles import (
    ROWS,
    SHARES,
    SPAN,
    TILE,
    WARPS,
    WIDTH,
    BfloatTiles,
    Q8Tiles,
    Tiles,
)
from pallas_kernels.cached_rows import CachedRows, Q8Rows
from pallas_kernels.lane_kernel import lane_kernel

AT_ONCE = 8
"""Chunks whose sums a merging thread has under way."""

MERGERS = 4
"""Warpgroups that merge a head's row: each takes every `MERGERS`-th run of `AT_ONCE` chunks."""

_MERGED_BYTES = 16
"""What a thread hands over: a largest score, a total, and two sums."""

_LOWEST = -1e30
_SCALE = math.log2(math.e) / math.sqrt(WIDTH)

SIZES = ((0, 128), (2048, 512), (8192, 1024))
"""Chunks: from which position on, how many positions. Short texts need many blocks to be fast."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Static sizes of one call.

    Attributes:
      heads, kv_heads: query and KV heads; head h reads KV head h // (heads / kv_heads).
      capacity: positions of the cache.
      first: first position that holds a key.
      tiles: format of the cache.
    """

    heads: int
    kv_heads: int
    capacity: int
    first: int = 0
    tiles: type[Tiles] = BfloatTiles

    def __post_init__(self):
        if self.heads % self.kv_heads or self.group not in (2, 4, 6, 8):
            raise ValueError(
                f"{self.heads=} over {self.kv_heads=} must be 2, 4, 6 or 8 heads each; use "
                "attention_reference"
            )
        if self.capacity % TILE:
            raise ValueError(f"{self.capacity=} must be a multiple of {TILE=}")

    @classmethod
    def of(cls, q: Array, k: CachedRows, first: int, **format: Any) -> Self:
        """Returns the sizes of queries over a cache.

        Args:
          q: queries.
          k: cached keys of all layers.
          first: first position that holds a key.
          **format: of the cache.

        Raises:
          ValueError: sizes that have no kernel, or another number of rows.
        """
        (rows, heads, width), (_, capacity, kv_heads, _) = q.shape, k.shape
        if rows != ROWS or width != WIDTH:
            raise ValueError(f"{q.shape=} must be {ROWS} rows of width {WIDTH}")
        return cls(heads=heads, kv_heads=kv_heads, capacity=capacity, first=first, **format)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def row_tiles(self) -> int:
        """Warps that it takes to hold all rows, two heads each."""
        return self.group // 2

    @property
    def workers(self) -> int:
        """Warps that compute; all of them load."""
        return self.row_tiles * SHARES

    @property
    def chunks(self) -> int:
        """Chunks of the cache."""
        return sum(
            -(-max(0, min(self.capacity, end) - start) // size)
            for (start, size), end in zip(
                SIZES, [*(start for start, _ in SIZES[1:]), self.capacity], strict=True
            )
        )

    @property
    def blocks(self) -> int:
        """Blocks of threads: one for each chunk and KV head."""
        return self.chunks * self.kv_heads


def shared_bytes(cut: Cut) -> int:
    """Returns the shared memory of a block of threads: queries, and stages of keys and values."""
    return cut.tiles.query_bytes(cut.group) + cut.tiles.stages * cut.tiles.stage_bytes


def fits(q: Float[Array, "rows heads width"], k: CachedRows) -> bool:
    """Returns whether there is a kernel for queries over a cache of such shape and format."""
    (rows, heads, width), (*_, kv_heads, _) = q.shape, k.shape
    sizes_fit = rows == ROWS and width == WIDTH and heads // kv_heads in (2, 4, 6, 8)
    return sizes_fit and (isinstance(k, Q8Rows) or k.dtype == jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("first", "gate_columns"))
def attn_decode(
    q: Float[Array, "rows heads width"],
    k: CachedRows,
    v: CachedRows,
    layer: Int[Array, ""],
    positions: Int[Array, " rows"],
    end: Int[Array, ""],
    gate: Float[Array, "rows ..."],
    first: int = 0,
    gate_columns: tuple[int, int, int] | None = None,
) -> Float[Array, "rows heads width"]:
    """Returns `sigmoid(gate)` times each row's attention over the keys up to its position.

    Args:
      q: queries, normalised and rotated, `ROWS` of them.
      k: cached keys of all layers [layers, capacity, kv_heads, width], in bfloat16 or q8_0.
      v: cached values.
      layer: which.
      positions: of each row; a row at -1 gets zeros.
      end: positions from here on are not read; at least 1 + the last live position.
      gate: output gates before their sigmoid, [rows, heads, width] or in a wider matrix.
      first: first position that holds a key.
      gate_columns: of that matrix: length of a row, the first gate's column, and columns from one
        head's to the next's.

    Raises:
      ValueError: sizes that have no kernel, or another number of rows.
    """
    tiles = Q8Tiles if isinstance(k, Q8Rows) else BfloatTiles
    cut = Cut.of(q, k, first, tiles=tiles)
    launch = functools.partial(
        lane_kernel,
        functools.partial(chunk_kernel, ptx, cut),
        warpgroups=WARPS // 4,
        shared=[shared_bytes(cut)],
    )
    return attend("attn_decode", launch, cut, q, k, v, layer, positions, end, gate, gate_columns)


def attend(
    name: str,
    launch: Callable[..., Callable],
    cut: Cut,
    q: Float[Array, "rows heads width"],
    k: CachedRows,
    v: CachedRows,
    layer: Int[Array, ""],
    positions: Int[Array, " rows"],
    end: Int[Array, ""],
    gate: Float[Array, "rows ..."],
    gate_columns: tuple[int, int, int] | None,
) -> Float[Array, "rows heads width"]:
    """Returns what `attn_decode` does: a kernel attends to every chunk, another one merges them.

    Args:
      name: what the kernels' names begin with.
      launch: `lane_kernel` of the first kernel, but for its results, name and grid.
      cut: sizes.
      q: queries; this and the others as for `attn_decode`.
      k: cached keys.
      v: cached values.
      layer: which.
      positions: of each row.
      end: where the history ends.
      gate: output gates.
      gate_columns: where they are.
    """
    counts = (positions + 1).astype(jnp.int32)
    scalars = jnp.reshape(layer, 1), jnp.reshape(end, 1)
    shape = (cut.chunks, cut.heads, ROWS)
    sums, stats = launch(
        [jax.ShapeDtypeStruct((*shape, w), jnp.float32) for w in (WIDTH, 2)],
        name=f"{name}_kernel",
        grid=cut.blocks,
        follows=True,
    )(q, *jax.tree.leaves((k, v)), counts, *scalars)
    return lane_kernel(
        functools.partial(merge_kernel, ptx, cut, gate_columns or (cut.heads * WIDTH, 0, WIDTH)),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        name=f"{name}_merge_kernel",
        grid=cut.heads * ROWS,
        warpgroups=MERGERS,
        shared=[merge_shared_bytes()],
        follows=True,
    )(sums, stats, gate, counts)


def chunk_of(isa, index):
    """Returns where a chunk begins and how many positions it has."""
    start, size, before = isa.Word(0), isa.Word(0), 0
    for i, (begin, length) in enumerate(SIZES):
        if i:
            before += (begin - SIZES[i - 1][0]) // SIZES[i - 1][1]
        inside = isa.Word(before - 1) < index if before else index.equals(index)
        start = isa.select(inside, (index - before) * length + begin, start)
        size = isa.select(inside, length, size)
    return start, size


def _shrunk(isa, old, new):
    """Returns the factor of sums whose largest score was `old`: exactly 1 where it still is."""
    return isa.exp2(isa.product_of(isa.sum_of(old, -new), isa.Float(_SCALE)))


def _smaller(isa, a, b):
    return isa.select(a < b, a, b)


class _Chunk:
    """Where a thread is, and the sizes of its chunk."""

    def __init__(self, isa, cut: Cut, q, *refs):
        self.isa, self.cut = isa, cut
        *cache, counts, layer, end, sums, stats, shared = refs
        self.q, self.sums, self.stats, counts = (
            isa.global_address(ref) for ref in (q, sums, stats, counts)
        )
        self.layer, self.end = (
            isa.uniform(isa.load_global(isa.global_address(ref))[0]) for ref in (layer, end)
        )
        # The longest chunks go first, to the blocks that start first.
        block = isa.Word(cut.chunks * cut.kv_heads - 1) - isa.block_index()
        self.index, self.kv_head = block // cut.kv_heads, block % cut.kv_heads
        self.start, size = chunk_of(isa, self.index)
        stop = _smaller(isa, self.start + size, self.end)
        length = isa.select(self.start < stop, stop - self.start, 0)
        self.num_tiles = (length + (TILE - 1)) // TILE
        self.thread = isa.thread_index()
        self.warp, self.lane = isa.uniform(self.thread >> 5), self.thread & 31
        self.row_tile, self.share = self.warp % cut.row_tiles, self.warp // cut.row_tiles
        self.computes = self.warp < cut.workers
        self.row = self.lane >> 2
        self.count = isa.load_global(isa.offset_address(counts, self.row, 4))[0]
        self.queries = isa.shared_address(shared)
        self.stages = self.queries + cut.tiles.query_bytes(cut.group)
        self.tiles = cut.tiles(self, tuple(isa.global_address(ref) for ref in cache))

    def stage(self, index):
        """Returns the address of a stage."""
        return self.stages + index * self.cut.tiles.stage_bytes

    def fetch(self, tile, stage) -> None:
        """Starts the copies of a tile, if there is one, and closes their group."""
        with self.isa.when(tile < self.num_tiles):
            self.tiles.fetch(self.start + tile * TILE, self.stage(stage))
        self.isa.close_copies()


def chunk_kernel(isa, cut: Cut, *refs) -> None:
    """Runs one thread of the kernel that attends to one chunk for one KV head.

    Args:
      isa: instructions: `ptx`, or a model of them.
      cut: sizes.
      *refs: operands, results and shared memory.
    """
    at = _Chunk(isa, cut, *refs)
    stages = cut.tiles.stages
    for tile in range(stages - 1):
        at.fetch(isa.Word(tile), isa.Word(tile))
    at.tiles.load_queries()
    zero, low = isa.Float(0.0), isa.Float(_LOWEST)
    carry = ([[zero] * 4 for _ in range(WIDTH // 8)], [low, low], [zero, zero])

    def step(tile, carry):
        stage, carry = carry
        isa.wait_copies(stages - 2)
        isa.sync_threads(0, 32 * WARPS)
        free = isa.select(stage.equals(0), stages - 1, stage - 1)
        at.fetch(tile + (stages - 1), free)
        carry = isa.choose(at.computes, lambda: _attend(at, tile, stage, carry), carry)
        return isa.select(stage.equals(stages - 1), 0, stage + 1), carry

    _, carry = isa.loop(0, at.num_tiles, 1, (isa.Word(0), carry), step)
    isa.wait_copies(0)
    isa.sync_threads(0, 32 * WARPS)
    with isa.when(isa.Word(0) < at.num_tiles):
        _merge_shares(at, carry)


def _attend(at: _Chunk, tile, stage, carry):
    """Returns sums, largest scores and totals after a warp's share of a tile."""
    isa, cut = at.isa, at.cut
    sums, tops, totals = carry
    scores = at.tiles.scores(at.stage(stage))
    first = at.start + tile * TILE + at.share * SPAN + (at.lane & 3) * 2
    for n, score in enumerate(scores):
        for i in range(4):
            position = first + (8 * n + i % 2)
            score[i] = isa.select_float(position < at.count, score[i], isa.Float(-math.inf))
            if cut.first:
                score[i] = isa.select_float(position < cut.first, isa.Float(-math.inf), score[i])
    scale = isa.Float(_SCALE)
    new_tops, shrinks, new_totals = [], [], []
    for half in range(2):
        mine = [score[2 * half + i] for score in scores for i in range(2)]
        top = functools.reduce(isa.maximum, mine, tops[half])
        for distance in (1, 2):
            top = isa.maximum(top, isa.shuffle_xor(top, distance))
        base = -isa.product_of(top, scale)
        shrink = _shrunk(isa, tops[half], top)
        weights = [isa.exp2(isa.fma(score, scale, base)) for score in mine]
        for n, score in enumerate(scores):
            score[2 * half : 2 * half + 2] = weights[2 * n : 2 * n + 2]
        total = functools.reduce(isa.sum_of, weights, isa.product_of(totals[half], shrink))
        new_tops.append(top)
        shrinks.append(shrink)
        new_totals.append(total)
    # Largest scores seldom change; where none of a warp's does, all factors are 1.
    changed = isa.any_lane(
        isa.either(
            *(isa.as_word(x).differs(isa.as_word(y)) for x, y in zip(tops, new_tops, strict=True))
        )
    )
    sums = isa.choose(
        changed,
        lambda: [[isa.product_of(x, shrinks[i // 2]) for i, x in enumerate(sum_)] for sum_ in sums],
        sums,
    )
    at.tiles.add_values(at.stage(stage), scores, sums)
    return sums, new_tops, new_totals


def _merge_shares(at: _Chunk, carry) -> None:
    """Adds the shares' sums in order, and stores those of live rows."""
    isa, cut = at.isa, at.cut
    sums, tops, totals = carry
    for distance in (1, 2):
        totals = [isa.sum_of(total, isa.shuffle_xor(total, distance)) for total in totals]
    lane_bytes = 16 * 32
    share_bytes = (WIDTH // 8 + 1) * lane_bytes

    def place(share):
        return at.stages + (share * cut.row_tiles + at.row_tile) * share_bytes + at.lane * 16

    sends = at.share.differs(0)
    with isa.when(at.computes), isa.when(sends):
        for n, values in enumerate([*sums, [*tops, *totals]]):
            isa.store_shared(place(at.share), values, n * lane_bytes)
    isa.sync_threads(0, 32 * WARPS)
    with isa.when(at.share.equals(0)):
        for share in range(1, SHARES):
            other = place(isa.Word(share))
            stats = isa.load_shared_floats(other, WIDTH // 8 * lane_bytes, 4)
            ours, theirs = [], []
            for half in range(2):
                top = isa.maximum(tops[half], stats[half])
                ours.append(_shrunk(isa, tops[half], top))
                theirs.append(_shrunk(isa, stats[half], top))
                total = isa.product_of(totals[half], ours[half])
                totals[half] = isa.fma(stats[2 + half], theirs[half], total)
                tops[half] = top
            for n, mine in enumerate(sums):
                values = isa.load_shared_floats(other, n * lane_bytes, 4)
                sums[n] = [
                    isa.fma(values[i], theirs[i // 2], isa.product_of(mine[i], ours[i // 2]))
                    for i in range(4)
                ]
        _store_chunk(at, sums, tops, totals)


def _store_chunk(at: _Chunk, sums, tops, totals) -> None:
    isa, cut = at.isa, at.cut
    with isa.when(isa.Word(0) < at.count):
        for half in range(2):
            head = at.kv_head * cut.group + at.row_tile * 2 + half
            place = (at.index * cut.heads + head) * ROWS + at.row
            out = isa.offset_address(at.sums, place, 4 * WIDTH)
            stride, _ = at.tiles.column(0, 0)
            out = isa.offset_address(out, at.lane & 3, 4 * stride)
            for n, values in enumerate(sums):
                for i in range(2):
                    _, column = at.tiles.column(n, i)
                    isa.store_global(out, [values[2 * half + i]], 4 * column)
            with isa.when((at.lane & 3).equals(0)):
                stats = isa.offset_address(at.stats, place, 8)
                isa.store_global(stats, [tops[half]])
                isa.store_global(stats, [totals[half]], 4)


def num_chunks(isa, cut: Cut, count):
    """Returns how many chunks hold the first `count` positions."""
    total = isa.Word(0)
    ends = [*(start for start, _ in SIZES[1:]), cut.capacity]
    for (start, size), end in zip(SIZES, ends, strict=True):
        stop = _smaller(isa, count, isa.Word(end))
        length = isa.select(isa.Word(start) < stop, stop - start, 0)
        total = total + (length + (size - 1)) // size
    return total


def merge_shared_bytes() -> int:
    """Returns the shared memory of a block of threads of `merge_kernel`."""
    return (MERGERS - 1) * 128 * _MERGED_BYTES


def merge_kernel(isa, cut: Cut, gates_at, sums, stats, gate, counts, out, shared) -> None:
    """Runs one thread of the kernel that adds a row's chunks in order, and gates.

    Args:
      isa: instructions: `ptx`, or a model of them.
      cut: sizes.
      gates_at: `gate_columns` of `attn_decode`.
      sums: of `chunk_kernel`, not yet divided by their totals.
      stats: largest score and total of each row and chunk.
      gate: of `attn_decode`.
      counts: positions that each row sees.
      out: the result.
      shared: shared memory.
    """
    sums, stats, gate, counts, out = map(isa.global_address, (sums, stats, gate, counts, out))
    shared, thread = isa.shared_address(shared), isa.thread_index()
    head, row = isa.block_index() // ROWS, isa.block_index() % ROWS
    pair, merger = thread & 127, isa.uniform(thread >> 7)
    (count,) = isa.load_global(isa.offset_address(counts, row, 4))
    chunks = num_chunks(isa, cut, count)
    length, begin, distance = gates_at
    gate_at = isa.offset_address(gate, row * length + head * distance + begin + pair * 2, 4)
    gates = isa.load_global_floats(gate_at, 0, 2)

    def add(run, carry):
        parts = []
        for i in range(AT_ONCE):
            index = (run + merger) * AT_ONCE + i
            inside = index < chunks
            chunk = (isa.select(inside, index, 0) * cut.heads + head) * ROWS + row
            largest, part = isa.load_global_floats(isa.offset_address(stats, chunk, 8), 0, 2)
            at = isa.offset_address(isa.offset_address(sums, chunk, 4 * WIDTH), pair, 8)
            parts.append((inside, largest, part, isa.load_global_floats(at, 0, 2)))
        return _with_parts(isa, carry, parts)

    zero = isa.Float(0.0)
    carry = isa.Float(_LOWEST), zero, [zero, zero]
    carry = isa.loop(0, (chunks + (AT_ONCE - 1)) // AT_ONCE, MERGERS, carry, add)

    def place(other):
        return shared + (other * 128 + pair) * _MERGED_BYTES

    with isa.when(merger.differs(0)):
        top, total, acc = carry
        isa.store_shared(place(merger - 1), [top, total, *acc])
    isa.sync_threads(0, MERGERS * 128)
    with isa.when(merger.equals(0)):
        parts = []
        for other in range(MERGERS - 1):
            top, total, *acc = isa.load_shared_floats(place(isa.Word(other)), 0, 4)
            parts.append((isa.Word((other + 1) * AT_ONCE) < chunks, top, total, acc))
        _, total, acc = _with_parts(isa, carry, parts)
        live = isa.Word(0) < count
        divisor = isa.reciprocal(isa.select_float(live, total, isa.Float(1.0)))
        at = isa.offset_address(out, (row * cut.heads + head) * (WIDTH // 2) + pair, 8)
        for i in range(2):
            value = isa.product_of(isa.product_of(acc[i], divisor), isa.sigmoid(gates[i]))
            isa.store_global(at, [isa.select_float(live, value, zero)], 4 * i)


def _with_parts(isa, carry, parts):
    """Returns largest score, total and sums with some parts added in order.

    Args:
      isa: instructions.
      carry: what there is.
      parts: whether each counts, and its largest score, total and sums.
    """
    top, total, acc = carry
    tops = [isa.select_float(inside, m, isa.Float(_LOWEST)) for inside, m, *_ in parts]
    new_top = functools.reduce(isa.maximum, tops, top)
    shrink = _shrunk(isa, top, new_top)
    total, *acc = (isa.product_of(x, shrink) for x in (total, *acc))
    for inside, largest, part, values in parts:
        weight = isa.select_float(inside, _shrunk(isa, largest, new_top), isa.Float(0.0))
        total = isa.fma(weight, part, total)
        acc = [isa.fma(weight, value, x) for value, x in zip(values, acc, strict=True)]
    return new_top, total, acc
