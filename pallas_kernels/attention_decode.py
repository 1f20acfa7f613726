"""Attention of a cycle's rows against a long cache, for sm_90 GPUs, on the tensor cores.

Chunks of the cache (`attention_chunks`) are attended to apart: a first kernel computes every
chunk's sums, and a second one merges them. The first one's grid is persistent: a block of threads
goes from chunk to chunk of one KV head. All rows of all query heads that read it stand in the 64
rows of one matrix, and one consumer warpgroup goes through a chunk's tiles as that of
`attention_prefill` does. Producer warpgroups, one for keys and one for values, have copies of two
tiles under way each, of the next chunk too, while they convert the tile before in place
(`attention_panels`): threads that multiply convert nothing, and threads that wait for memory hold
no registers.

A row's bits follow from its position alone: tiles begin at fixed positions, and are taken in order.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.attention_chunks import GROUPS, ROWS, Cut, chunk_of, merge, num_chunks
from pallas_kernels.attention_panels import (
    WIDTH,
    BfloatPanels,
    Panels,
    Q8Panels,
    bring_queries,
    piece_place,
)
from pallas_kernels.attention_prefill import ROWS as MATRIX_ROWS
from pallas_kernels.attention_prefill import Consumer, advance, arrive
from pallas_kernels.cached_rows import CachedRows, Q8Rows
from pallas_kernels.lane_kernel import lane_kernel

POSITIONS = 64
"""Positions of a tile: they divide every chunk."""

STAGES = 3
"""Tiles of keys, and of values, that shared memory holds: all but one on their way."""

STAGE_BYTES = 2 * POSITIONS * WIDTH
"""Of a tile's keys, or values, in 16 bits."""

PRODUCERS = 4
"""Warps that bring keys, and warps that bring values."""

THREADS = 3 * 128

MULTIPROCESSORS = 132
"""Blocks that run at once: shared memory holds one a multiprocessor."""

_AT_ONCE = 8  # pieces of a thread that wait for memory together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Cut):
    """Static sizes of one call.

    Attributes:
      panels: format of the cache.
    """

    panels: type[Panels] = BfloatPanels

    def __post_init__(self):
        """Raises ValueError for sizes that have no kernel."""
        super().__post_init__()
        if self.capacity % POSITIONS:
            raise ValueError(f"{self.capacity=} must be a multiple of {POSITIONS=}")

    @property
    def row_tiles(self) -> int:
        """Warps that hold all rows, two heads each."""
        return self.group // 2

    @property
    def sharers(self) -> int:
        """Blocks of threads of a KV head: all of them together run at once."""
        return min(self.chunks, MULTIPROCESSORS // self.kv_heads)

    @property
    def blocks(self) -> int:
        """Blocks of threads."""
        return self.sharers * self.kv_heads

    @property
    def shared_bytes(self) -> list[int]:
        """Sizes of: queries, keys and values, barriers."""
        return [2 * MATRIX_ROWS * WIDTH, 2 * STAGES * STAGE_BYTES, 4 * STAGES * 8]


def fits(q: Float[Array, "rows heads width"], k: CachedRows) -> bool:
    """Returns whether there is a kernel for queries over a cache of such shape and format."""
    (rows, heads, width), (*_, kv_heads, _) = q.shape, k.shape
    groups_fit = heads % kv_heads == 0 and heads // kv_heads in GROUPS
    sizes_fit = rows == ROWS and width == WIDTH and groups_fit
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

    Queries and keys are rounded to float16, softmax weights to bfloat16, and a q8_0 cache's values
    to bfloat16.

    Args:
      q: queries, normalised and rotated, `ROWS` of them.
      k: cached keys of all layers [layers, capacity, kv_heads, width], in bfloat16 or q8_0,
        normalised: they must fit float16.
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
    panels = Q8Panels if isinstance(k, Q8Rows) else BfloatPanels
    plan = Plan.of(q, k, first, panels=panels)
    counts = (positions + 1).astype(jnp.int32)
    shape = plan.chunks, plan.heads, ROWS
    sums, stats = lane_kernel(
        functools.partial(_kernel, plan),
        [jax.ShapeDtypeStruct((*shape, size), jnp.float32) for size in (WIDTH, 2)],
        name="attn_decode_kernel",
        grid=plan.blocks,
        warpgroups=THREADS // 128,
        shared=plan.shared_bytes,
        follows=True,
    )(q, *jax.tree.leaves((k, v)), counts, jnp.reshape(layer, 1), jnp.reshape(end, 1))
    return merge(plan, sums, stats, gate, counts, gate_columns)


class Block:
    """Where a thread is, its block's KV head and chunks, and addresses; `Panels` reads it.

    A KV head's chunks are dealt to its blocks longest first, back and forth, so that who got a
    long one first gets a short one next.

    Args:
      isa: instructions: `ptx`, or a model of them.
      plan: sizes.
      refs: operands, results and shared memory.
    """

    stages = STAGES

    def __init__(self, isa, plan: Plan, refs):
        """Takes what the class names."""
        self.isa, self.plan = isa, plan
        q, *cache, counts, layer, end, sums, stats, queries, tiles, barriers = refs
        self.q, self.sums, self.stats, counts, layer, end = (
            isa.global_address(ref) for ref in (q, sums, stats, counts, layer, end)
        )
        cache = [isa.global_address(ref) for ref in cache]
        self.arrays = cache[: plan.panels.parts], cache[plan.panels.parts :]
        self.thread = isa.thread_index()
        self.lane = self.thread & 31
        self.row = self.lane >> 2
        """Of the cycle; the two halves of a lane's matrix rows are two heads."""
        # All three are on their way before the first is waited for.
        counts = isa.offset_address(counts, self.row, 4)
        loaded = [isa.load_global(address)[0] for address in (layer, end, counts)]
        self.layer, self.end, self.warp = map(isa.uniform, (*loaded[:2], self.thread >> 5))
        self.count = loaded[2]
        block = isa.block_index()
        self.place, self.kv_head = block // plan.kv_heads, block % plan.kv_heads
        self.num_chunks = num_chunks(isa, plan, self.end)
        whole = self.num_chunks // plan.sharers
        more = self._dealt(whole) < self.num_chunks - whole * plan.sharers
        self.rounds = isa.select(more, whole + 1, whole)
        """How many chunks the block has."""
        self.queries, self.tiles, self.barriers = (
            isa.shared_address(ref) for ref in (queries, tiles, barriers)
        )

    def _dealt(self, turn):
        """Returns how many blocks get their chunk of a round before this one does."""
        back = self.isa.Word(self.plan.sharers - 1) - self.place
        return self.isa.select((turn & 1).equals(0), self.place, back)

    def chunk(self, turn) -> tuple:
        """Returns number, first position and end of the chunk of a round."""
        isa = self.isa
        index = self.num_chunks - 1 - turn * self.plan.sharers - self._dealt(turn)
        start, size = chunk_of(isa, index)
        stop = start + size
        return index, start, isa.select(stop < self.end, stop, self.end)

    def num_tiles(self):
        """Returns how many tiles all of the block's chunks have."""
        isa = self.isa

        def add(turn, total):
            _, start, stop = self.chunk(turn)
            return total + (stop - start + (POSITIONS - 1)) // POSITIONS

        return isa.loop(0, self.rounds, 1, isa.Word(0), add)

    def tile(self, which: int, stage):
        """Returns the address of a stage of keys (0) or of values (1)."""
        return self.tiles + (stage + which * STAGES) * STAGE_BYTES

    def full(self, which: int, stage):
        """Returns the barrier of a stage that has come."""
        return self.barriers + (stage + 2 * which * STAGES) * 8

    def empty(self, which: int, stage):
        """Returns the barrier of a stage that may be replaced."""
        return self.full(which, stage) + STAGES * 8


class Chunk:
    """A chunk of a block, as `Consumer` reads it.

    Args:
      block: whose.
      turn: number of the round.
    """

    positions, stages = POSITIONS, STAGES

    def __init__(self, block: Block, turn):
        """Takes what the class names."""
        self.block, self.isa, self.plan = block, block.isa, block.plan
        self.lane, self.tile, self.full, self.empty = (
            block.lane,
            block.tile,
            block.full,
            block.empty,
        )
        self.index, self.start, stop = block.chunk(turn)
        self.first_tile = self.isa.Word(0)
        self.end_tile = (stop - self.start + (POSITIONS - 1)) // POSITIONS
        self.plain_tile = self._plain_tile()

    def _plain_tile(self):
        """Returns the first tile from which on some live row may not see every position.

        The chunk's first tile is masked in any case.
        """
        isa, count = self.isa, self.block.count
        # Idle rows may see what they like: nothing of theirs is stored.
        least = isa.select(count.equals(0), self.plan.capacity, count)
        for distance in (4, 8, 16):
            other = isa.shuffle_word_xor(least, distance)
            least = isa.select(other < least, other, least)
        least = isa.uniform(least)
        tile = isa.select(self.start < least, least - self.start, 0) // POSITIONS
        if self.plan.first:
            tile = isa.select(self.start < self.plan.first, 0, tile)
        return tile

    def position(self, tile):
        """Returns the first position of a tile."""
        return self.start + tile * POSITIONS

    def seen(self, half: int):
        """Returns how many positions a lane's row of either half sees."""
        del half
        return self.block.count


def _kernel(plan: Plan, *refs) -> None:
    at = Block(ptx, plan, refs)

    def consumes():
        ptx.set_registers(232, grow=True)
        consume(at)

    def produces():
        ptx.set_registers(136, grow=False)
        ptx.branch(at.warp < 4 + PRODUCERS, lambda: produce(at, 0), lambda: produce(at, 1))

    def work():
        with ptx.when(at.thread.equals(0)):
            prepare_barriers(ptx, at)
        ptx.sync_threads(0, THREADS)
        ptx.branch(at.warp < 4, consumes, produces)

    ptx.branch(ptx.Word(0) < at.rounds, work, lambda: None)


def prepare_barriers(isa, at: Block) -> None:
    """Prepares the barriers: one arrival of every warp that fills, or reads, a stage."""
    for which in range(2):
        for stage in range(STAGES):
            isa.barrier_init(at.full(which, isa.Word(stage)), PRODUCERS)
            isa.barrier_init(at.empty(which, isa.Word(stage)), 4)
    isa.fence_barriers()


def produce(at: Block, which: int) -> None:
    """Emits the work of the warpgroup that brings keys (0) or values (1) of all chunks."""
    isa, ahead = at.isa, STAGES - 1
    panels = at.plan.panels(at, which, POSITIONS, PRODUCERS, _AT_ONCE)

    def fetch(coming):
        """Starts the copies of the next tile, of the next chunk where one has ended."""
        ring, turn, position, stop = coming
        stage, parity = ring

        def copy():
            isa.barrier_wait(at.empty(which, stage), parity)
            panels.fetch(position, at.tile(which, stage))

        isa.branch(turn < at.rounds, copy, lambda: None)
        isa.close_copies()
        position = position + POSITIONS
        inside = position < stop
        _, start, end = at.chunk(turn + 1)
        return (
            advance(at, ring),
            isa.select(inside, turn, turn + 1),
            isa.select(inside, position, start),
            isa.select(inside, stop, end),
        )

    def feed(_, carry):
        coming, (stage, parity) = carry
        isa.wait_copies(ahead - 1)
        panels.convert(at.tile(which, stage))
        isa.fence_shared_writes()
        arrive(at, at.full(which, stage))
        # The stage of the tile before, which may still be read: so after this one's work.
        return fetch(coming), advance(at, (stage, parity))

    _, start, stop = at.chunk(isa.Word(0))
    # A fresh barrier's phase before the first counts as over.
    coming = (isa.Word(0), isa.Word(1)), isa.Word(0), start, stop
    for _ in range(ahead):
        coming = fetch(coming)
    ready = isa.Word(0), isa.Word(0)
    isa.loop(0, at.num_tiles(), 1, (coming, ready), feed)


def consume(at: Block) -> None:
    """Emits the work of the consumer warpgroup: queries in, and the sums of every chunk out."""
    isa = at.isa
    _load_queries(at)

    def attend(turn, ring):
        chunk = Chunk(at, turn)
        *results, ring = Consumer(chunk, at.queries).attend(ring)
        _store(chunk, *results)
        return ring

    isa.loop(0, at.rounds, 1, (isa.Word(0), isa.Word(0)), attend)


def _load_queries(at: Block) -> None:
    """Writes the queries to shared memory, rounded to float16; rows that no head has are zeros."""
    isa, plan = at.isa, at.plan
    piece, row = at.thread & 31, (at.thread >> 5) & 3
    rows = [row + 4 * turn for turn in range(MATRIX_ROWS // 4)]
    used = plan.group * ROWS // 4

    def source_of(row):
        # Row m of the matrix is row m % 8 of head m / 8.
        head = at.kv_head * plan.group + (row >> 3)
        place = ((row & 7) * plan.heads + head) * (WIDTH // 8) + piece
        return isa.offset_address(at.q, place, 32)

    def place_of(row):
        return at.queries + piece_place(row, piece, MATRIX_ROWS)

    bring_queries(isa, rows[:used], source_of, place_of, _AT_ONCE)
    for row in rows[used:]:
        isa.store_shared(place_of(row), [isa.Word(0)] * 4)
    isa.fence_shared_writes()
    isa.sync_threads(1, 128)


def _store(chunk: Chunk, sums, tops, totals) -> None:
    """Stores live rows' sums, largest scores and totals, for `merge`."""
    at, isa, plan = chunk.block, chunk.isa, chunk.plan
    with isa.when(at.warp < plan.row_tiles), isa.when(isa.Word(0) < at.count):
        for half in range(2):
            head = at.kv_head * plan.group + at.warp * 2 + half
            place = (chunk.index * plan.heads + head) * ROWS + at.row
            out = isa.offset_address(at.sums, place, 4 * WIDTH)
            out = isa.offset_address(out, at.lane & 3, 8)
            for j in range(WIDTH // 8):
                isa.store_global(out, sums[4 * j + 2 * half :][:2], 32 * j)
            with isa.when((at.lane & 3).equals(0)):
                stats = isa.offset_address(at.stats, place, 8)
                isa.store_global(stats, [tops[half], totals[half]])
