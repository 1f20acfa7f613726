"""Attention of a prompt's chunk against a long cache, for sm_90 GPUs, on the tensor cores.

A block of threads takes 64 rows of two query heads that read the same KV head, one consumer
warpgroup each. A producer warpgroup streams tiles of keys and of values through two rings in shared
memory; a consumer multiplies the next tile's keys while it adds the last tile's values, and the
softmax of one runs beside the products of the other. Tiles begin at fixed positions and are taken
in order, so a row's bits follow from its position and its own history alone.

Softmax is online and in float32. Queries times keys are products of float16, weights times values
of bfloat16: see `attention_panels`. FlashAttention-3 (Shah et al., 2024).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.attention_panels import (
    LOWEST,
    PANEL_BYTES,
    PANELS,
    SCALE,
    TILE,
    TILE_BYTES,
    WIDTH,
    BfloatPanels,
    Panels,
    Q8Panels,
    bring_queries,
    piece_place,
)
from pallas_kernels.cached_rows import CachedRows, Q8Rows
from pallas_kernels.lane_kernel import lane_kernel

ROWS = 64
"""Rows of a block of threads."""

HEADS = 2
"""Query heads of a block: one for each consumer warpgroup."""

STAGES = 2
"""Tiles of keys, and of values, that shared memory holds."""

FEWEST = 17
"""Rows of a chunk, at least: fewer are a cycle's, and read a long cache faster by other means."""

_THREADS = 128 * (HEADS + 1)
_QUERY_BYTES = 2 * ROWS * WIDTH
_AT_ONCE = 16  # loads of a thread that wait for memory together
_PRODUCERS = 2  # warps that bring keys, and warps that bring values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes of one call.

    Attributes:
      rows: of the chunk.
      heads, kv_heads: query and KV heads; head h reads KV head h // (heads / kv_heads).
      capacity: positions of the cache.
      first: first position that holds a key.
      panels: format of the cache.
    """

    rows: int
    heads: int
    kv_heads: int
    capacity: int
    first: int = 0
    panels: type[Panels] = BfloatPanels

    def __post_init__(self):
        """Raises ValueError for heads that do not go in pairs."""
        if self.heads % (HEADS * self.kv_heads):
            raise ValueError(
                f"{self.heads=} over {self.kv_heads=} must be an even number of heads each; use "
                "attention_reference"
            )

    @property
    def row_tiles(self) -> int:
        """Blocks of threads that it takes to hold all rows."""
        return -(-self.rows // ROWS)

    @property
    def pairs(self) -> int:
        """Pairs of query heads."""
        return self.heads // HEADS

    @property
    def shared_bytes(self) -> list[int]:
        """Sizes of: queries, keys and values, barriers."""
        return [HEADS * _QUERY_BYTES, 2 * STAGES * TILE_BYTES, 4 * STAGES * 8]


def fits(q: Float[Array, "rows heads width"], k: CachedRows) -> bool:
    """Returns whether there is a kernel for queries over a cache of such shape and format."""
    (rows, heads, width), (*_, kv_heads, _) = q.shape, k.shape
    sizes_fit = rows >= FEWEST and width == WIDTH and heads % (HEADS * kv_heads) == 0
    return sizes_fit and (isinstance(k, Q8Rows) or k.dtype == jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="first")
def attn_prefill(
    q: Float[Array, "rows heads width"],
    k: CachedRows,
    v: CachedRows,
    layer: Int[Array, ""],
    start: Int[Array, ""],
    end: Int[Array, ""],
    gate: Float[Array, "rows heads width"],
    first: int = 0,
) -> Float[Array, "rows heads width"]:
    """Returns `sigmoid(gate)` times each row's attention over the keys up to its position.

    Row r stands at position `start` + r. It counts if that is at least `first` and below `end`;
    the others get zeros.

    Args:
      q: queries, normalised and rotated.
      k: cached keys of all layers [layers, capacity, kv_heads, width], in bfloat16 or q8_0, those
        of the rows among them.
      v: cached values.
      layer: which.
      start: position of the first row, at least -1.
      end: the position after the last row that counts; nothing is read from there on.
      gate: output gates before their sigmoid.
      first: first position that holds a key.

    Raises:
      ValueError: sizes that have no kernel.
    """
    (rows, heads, width), (_, capacity, kv_heads, _) = q.shape, k.shape
    if width != WIDTH:
        raise ValueError(f"{q.shape=} must be rows of heads of width {WIDTH}")
    plan = Plan(
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        capacity=capacity,
        first=first,
        panels=Q8Panels if isinstance(k, Q8Rows) else BfloatPanels,
    )

    return lane_kernel(
        lambda *refs: _kernel(plan, refs),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        name="attn_prefill_kernel",
        grid=plan.row_tiles * plan.pairs,
        warpgroups=HEADS + 1,
        shared=plan.shared_bytes,
    )(q, *jax.tree.leaves((k, v)), jnp.stack([layer, start, end]), gate)


class Places:
    """Where a thread is, which rows and tiles are its block's, and addresses."""

    positions, stages = TILE, STAGES

    def __init__(self, isa, plan: Plan, refs):
        """Takes the references of the kernel."""
        self.isa, self.plan = isa, plan
        q, *cache, numbers, gate, out, queries, tiles, barriers = refs
        self.q, self.gate, self.out = (isa.global_address(ref) for ref in (q, gate, out))
        cache = [isa.global_address(ref) for ref in cache]
        self.arrays = cache[: plan.panels.parts], cache[plan.panels.parts :]
        numbers = isa.global_address(numbers)
        self.layer, start, self.end = (
            isa.uniform(isa.load_global(numbers, 4 * i)[0]) for i in range(3)
        )
        self.thread = isa.thread_index()
        self.warp, self.lane = isa.uniform(self.thread >> 5), self.thread & 31
        # The longest histories go first, to the blocks that start first.
        index = isa.block_index()
        self.row = (isa.Word(plan.row_tiles - 1) - index // plan.pairs) * ROWS
        pair = index % plan.pairs
        self.kv_head = pair * HEADS // (plan.heads // plan.kv_heads)
        self.group = self.warp >> 2
        self.head = pair * HEADS + self.group
        self.count = start + self.row + 1
        """Positions up to the first row's own: words hold no number below 0."""
        self.first_tile = isa.Word(plan.first // TILE)
        stop = self.count + (ROWS - 1)
        stop = isa.select(stop < self.end, stop, self.end)
        self.end_tile = isa.select(self.count < self.end + 1, (stop + (TILE - 1)) // TILE, 0)
        # All rows see all positions of the tiles before this one, but of the first tile.
        self.plain_tile = self.count // TILE
        self.queries, self.tiles, self.barriers = (
            isa.shared_address(ref) for ref in (queries, tiles, barriers)
        )

    def tile(self, which: int, stage):
        """Returns the address of a stage of keys (0) or of values (1)."""
        return self.tiles + (stage + which * STAGES) * TILE_BYTES

    def position(self, tile):
        """Returns the first position of a tile."""
        return tile * TILE

    def seen(self, half: int):
        """Returns how many positions a lane's row of either half sees."""
        return self.count + _row_of(self, half)

    def full(self, which: int, stage):
        """Returns the barrier of a stage that has come."""
        return self.barriers + (stage + 2 * which * STAGES) * 8

    def empty(self, which: int, stage):
        """Returns the barrier of a stage that may be replaced."""
        return self.full(which, stage) + STAGES * 8


def _kernel(plan: Plan, refs) -> None:
    at = Places(ptx, plan, refs)
    with ptx.when(at.thread.equals(0)):
        prepare_barriers(ptx, at)
    ptx.sync_threads(0, _THREADS)

    def multiply():
        ptx.set_registers(232, grow=True)
        consume(at)

    def bring():
        ptx.set_registers(40, grow=False)
        ptx.branch(at.warp < 4 * HEADS + _PRODUCERS, lambda: produce(at, 0), lambda: produce(at, 1))

    ptx.branch(at.warp < 4 * HEADS, multiply, bring)


def prepare_barriers(isa, at: Places) -> None:
    """Prepares the barriers: one arrival of every warp that fills, or reads, a stage."""
    for which in range(2):
        for stage in range(STAGES):
            isa.barrier_init(at.full(which, isa.Word(stage)), _PRODUCERS)
            isa.barrier_init(at.empty(which, isa.Word(stage)), 4 * HEADS)
    isa.fence_barriers()


def advance(at: Any, ring):
    """Returns the next place in a ring of `at.stages`, and the parity of its next phase."""
    isa, (stage, parity) = at.isa, ring
    stays = stage < at.stages - 1
    return isa.select(stays, stage + 1, 0), isa.select(stays, parity, parity ^ 1)


def arrive(at: Any, barrier) -> None:
    """Counts this warp in, all of its lanes' work behind it."""
    at.isa.sync_warp()
    with at.isa.when(at.lane < 1):
        at.isa.barrier_arrive(barrier)


def produce(at: Places, which: int) -> None:
    """Emits the work of the two warps that bring keys (0) or values (1)."""
    isa = at.isa
    panels = at.plan.panels(at, which)

    def feed(tile, ring):
        stage, parity = ring
        isa.barrier_wait(at.empty(which, stage), parity)
        panels.bring(at.position(tile), at.tile(which, stage))
        isa.fence_shared_writes()
        arrive(at, at.full(which, stage))
        return advance(at, ring)

    # A fresh barrier's phase before the first counts as over.
    isa.loop(at.first_tile, at.end_tile, 1, (isa.Word(0), isa.Word(1)), feed)


def consume(at: Places) -> None:
    """Emits the work of a consumer warpgroup."""
    isa = at.isa

    def attend():
        queries = at.queries + at.group * _QUERY_BYTES
        _load_queries(at, queries)
        sums, _, totals, _ = Consumer(at, queries).attend((isa.Word(0), isa.Word(0)))
        _store(at, sums, totals)

    isa.branch(
        at.first_tile < at.end_tile,
        attend,
        lambda: _store(at, [isa.Float(0.0)] * (WIDTH // 2), [isa.Float(1.0)] * 2),
    )


def _row_of(at: Places, half: int):
    """Returns a lane's row of the block: it has the rows g and g + 8 of its warp's sixteen."""
    return (at.warp & 3) * 16 + (at.lane >> 2) + 8 * half


def _load_queries(at: Places, queries) -> None:
    """Writes the queries to shared memory, rounded to float16."""
    isa, plan = at.isa, at.plan
    thread = at.thread & 127
    piece = thread & 31

    def source_of(row):
        source = at.row + row
        source = isa.select(source < plan.rows, source, plan.rows - 1)
        place = (source * plan.heads + at.head) * (WIDTH // 8) + piece
        return isa.offset_address(at.q, place, 32)

    def place_of(row):
        return queries + piece_place(row, piece, ROWS)

    rows = ((thread >> 5) + first for first in range(0, ROWS, 4))
    bring_queries(isa, rows, source_of, place_of, _AT_ONCE // 2)
    isa.fence_shared_writes()
    isa.sync_threads(at.group + 1, 128)


def _store(at: Places, sums, totals) -> None:
    """Stores a head's gated rows, zeros for those that do not count."""
    isa, plan = at.isa, at.plan
    for half in range(2):
        row, count = at.row + _row_of(at, half), at.seen(half)
        live = isa.select(isa.Word(plan.first) < count, count, at.end + 1) < at.end + 1
        divisor = isa.reciprocal(isa.select_float(live, totals[half], isa.Float(1.0)))
        with isa.when(row < plan.rows):
            place = (row * plan.heads + at.head) * (WIDTH // 2) + (at.lane & 3)
            gate, out = (isa.offset_address(x, place, 8) for x in (at.gate, at.out))
            for first in range(0, WIDTH // 8, _AT_ONCE):
                some = range(first, first + _AT_ONCE)
                gates = [isa.load_global_floats(gate, 32 * j, 2) for j in some]
                for j, pair in zip(some, gates, strict=True):
                    values = []
                    for i, x in enumerate(pair):
                        value = isa.product_of(sums[4 * j + 2 * half + i], divisor)
                        value = isa.product_of(value, isa.sigmoid(x))
                        values.append(isa.select_float(live, value, isa.Float(0.0)))
                    isa.store_global(out, values, 32 * j)


def _tree(operation, values: list):
    """Returns all values taken together, in few steps one after another."""
    while len(values) > 1:
        pairs = [operation(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


class Consumer:
    """A consumer warpgroup's 64 rows.

    Args:
      at: where the thread is, as `Places` says it, or a kernel with other tiles.
      queries: address of the rows in float16, four panels of 64 values.
    """

    def __init__(self, at: Any, queries):
        """Takes what the class names."""
        self.at, self.isa, self.queries = at, at.isa, queries

    def attend(self, ring: tuple) -> tuple[list, list, list, tuple]:
        """Emits all tiles in order, at least one.

        Args:
          ring: where the first tile will come, and the parity of its phase.

        Returns:
          This thread's sums as of `ptx.wgmma`, [64, WIDTH], of its two rows the largest scores and
          the totals that the sums are to be divided by, and where the tile after the last comes.
        """
        at, isa = self.at, self.isa
        zero, low = isa.Float(0.0), isa.Float(LOWEST)
        scores = self._scores(ring)
        isa.wgmma_wait(0)
        scores = isa.pin(scores)
        arrive(at, at.empty(0, ring[0]))
        weights, tops, totals, _ = self._softmax(scores, at.first_tile, [low] * 2, [zero] * 2, True)
        weights = self._packed(weights)
        carry = advance(at, ring), ring, weights, tops, totals, [zero] * (WIDTH // 2)
        following, plain = at.first_tile + 1, at.plain_tile
        plain = isa.select(plain < following, following, plain)
        plain = isa.select(plain < at.end_tile, plain, at.end_tile)
        carry = isa.loop(following, plain, 1, carry, functools.partial(self._step, masked=False))
        carry = isa.loop(plain, at.end_tile, 1, carry, functools.partial(self._step, masked=True))
        coming, last, weights, tops, totals, sums = carry
        sums = self._add_values(last, weights, sums)
        isa.wgmma_wait(0)
        isa.pin(weights)
        sums = isa.pin(sums)
        arrive(at, at.empty(1, last[0]))
        for distance in (1, 2):
            totals = [isa.sum_of(total, isa.shuffle_xor(total, distance)) for total in totals]
        return sums, tops, totals, coming

    def _scores(self, ring) -> list:
        """Starts queries times a tile's keys, [64, positions] as in `ptx.wgmma`."""
        at, isa = self.at, self.isa
        stage, parity = ring
        isa.barrier_wait(at.full(0, stage), parity)
        left, right = isa.descriptor(self.queries), isa.descriptor(at.tile(0, stage))
        isa.wgmma_fence()
        scores: Any = at.positions // 2
        for step in range(WIDTH // 16):
            # Sixteen values are 32 bytes, two in units of a description.
            panel, within = step // PANELS, 2 * (step % PANELS)
            scores = isa.wgmma_shared(
                scores,
                left + (panel * (ROWS * PANEL_BYTES // 16) + within),
                right + (panel * (at.positions * PANEL_BYTES // 16) + within),
            )
        isa.wgmma_commit()
        return scores

    def _add_values(self, ring, weights, sums) -> list:
        """Starts to add weights times a tile's values to the sums, [64, WIDTH]."""
        at, isa = self.at, self.isa
        stage, parity = ring
        isa.barrier_wait(at.full(1, stage), parity)
        matrix = isa.descriptor_of_rows(at.tile(1, stage), at.positions * PANEL_BYTES)
        isa.wgmma_fence()
        for step in range(at.positions // 16):
            words = weights[4 * step : 4 * step + 4]
            sums = isa.wgmma_rows(sums, words, matrix + step * (16 * PANEL_BYTES // 16))
        isa.wgmma_commit()
        return sums

    def _step(self, tile, carry, masked: bool):
        """Returns the carry after a tile's softmax, the tile before it being added meanwhile."""
        at, isa = self.at, self.isa
        keys, values, weights, tops, totals, sums = carry
        scores = self._scores(keys)
        sums = self._add_values(values, weights, sums)
        isa.wgmma_wait(1)
        scores = isa.pin(scores)
        arrive(at, at.empty(0, keys[0]))
        new_weights, new_tops, totals, shrinks = self._softmax(scores, tile, tops, totals, masked)
        isa.wgmma_wait(0)
        isa.pin(weights)
        sums = isa.pin(sums)
        new_weights = self._packed([isa.pin(row) for row in new_weights])
        arrive(at, at.empty(1, values[0]))
        # Largest scores seldom change; where none of a warp's does, both factors are 1.
        changed = isa.any_lane(
            isa.either(
                *(
                    isa.as_word(x).differs(isa.as_word(y))
                    for x, y in zip(tops, new_tops, strict=True)
                )
            )
        )
        sums = isa.choose(
            changed,
            lambda: [isa.product_of(x, shrinks[i % 4 // 2]) for i, x in enumerate(sums)],
            sums,
        )
        return advance(at, keys), advance(at, values), new_weights, new_tops, totals, sums

    def _softmax(self, scores, tile, tops, totals, masked: bool):
        """Returns both rows' weights, largest scores, totals, and old sums' factors."""
        isa = self.isa
        scale = isa.Float(SCALE)
        weights, new_tops, new_totals, shrinks = [], [], [], []
        for half in range(2):
            mine = [
                scores[4 * j + 2 * half + i]
                for j in range(self.at.positions // 8)
                for i in range(2)
            ]
            if masked:
                mine = self._masked(mine, tile, half)
            top = isa.maximum(tops[half], _tree(isa.maximum, mine))
            for distance in (1, 2):
                top = isa.maximum(top, isa.shuffle_xor(top, distance))
            base = -isa.product_of(top, scale)
            shrink = isa.exp2(isa.product_of(isa.sum_of(tops[half], -top), scale))
            mine = [isa.exp2(isa.fma(score, scale, base)) for score in mine]
            total = isa.fma(totals[half], shrink, _tree(isa.sum_of, mine))
            weights.append(mine)
            new_tops.append(top)
            new_totals.append(total)
            shrinks.append(shrink)
        return weights, new_tops, new_totals, shrinks

    def _packed(self, weights) -> list:
        """Returns weights as left-hand operands: rows g and g + 8 of eight positions, and so on."""
        pack = self.isa.pack_bfloats
        return [
            pack(*row[2 * i : 2 * i + 2]) for i in range(self.at.positions // 8) for row in weights
        ]

    def _masked(self, scores, tile, half: int) -> list:
        """Returns scores, minus infinity where the row sees no key."""
        at, isa = self.at, self.isa
        count = at.seen(half)
        hidden, masked = isa.Float(-math.inf), []
        for j in range(at.positions // 8):
            for i in range(2):
                position = at.position(tile) + (at.lane & 3) * 2 + (8 * j + i)
                score = isa.select_float(position < count, scores[2 * j + i], hidden)
                if at.plan.first:
                    score = isa.select_float(position < at.plan.first, hidden, score)
                masked.append(score)
        return masked
