"""The chunks of a cache that a cycle's attention takes side by side, and their merge.

The cache is cut at fixed positions, short chunks first, so that short texts fill a card too.
`attention_decode` attends to each chunk by itself; a second kernel merges a row's chunks in order,
and gates. Which chunks a row has, and in which order they are summed, follows from its position
alone, and so do its bits. Flash-Decoding (Dao et al., 2023).
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.attention_panels import LOWEST, SCALE, WIDTH
from pallas_kernels.cached_rows import CachedRows
from pallas_kernels.lane_kernel import lane_kernel

ROWS = 8
"""Rows of a cycle."""

SIZES = ((0, 128), (2048, 512), (8192, 1024))
"""Chunks: from which position on, how many positions. Short texts need many blocks to be fast."""

GROUPS = (2, 4, 6, 8)
"""Numbers of query heads that may share a KV head."""

AT_ONCE = 8
"""Chunks whose sums a merging thread has under way."""

MERGERS = 4
"""Warpgroups that merge a head's row: each takes every `MERGERS`-th run of `AT_ONCE` chunks."""

_MERGED_BYTES = 16
"""What a thread hands over: a largest score, a total, and two sums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Static sizes of queries and of a cache cut into chunks.

    Attributes:
      heads, kv_heads: query and KV heads; head h reads KV head h // (heads / kv_heads).
      capacity: positions of the cache.
      first: first position that holds a key.
    """

    heads: int
    kv_heads: int
    capacity: int
    first: int = 0

    def __post_init__(self):
        """Raises ValueError for heads that have no kernel."""
        if self.heads % self.kv_heads or self.group not in GROUPS:
            raise ValueError(
                f"{self.heads=} over {self.kv_heads=} must be 2, 4, 6 or 8 heads each; use "
                "attention_reference"
            )

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
    def chunks(self) -> int:
        """Chunks of the cache."""
        return sum(
            -(-max(0, min(self.capacity, end) - start) // size)
            for (start, size), end in zip(
                SIZES, [*(start for start, _ in SIZES[1:]), self.capacity], strict=True
            )
        )


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


def num_chunks(isa, cut: Cut, count):
    """Returns how many chunks hold the first `count` positions."""
    total = isa.Word(0)
    ends = [*(start for start, _ in SIZES[1:]), cut.capacity]
    for (start, size), end in zip(SIZES, ends, strict=True):
        stop = isa.select(count < isa.Word(end), count, isa.Word(end))
        length = isa.select(isa.Word(start) < stop, stop - start, 0)
        total = total + (length + (size - 1)) // size
    return total


def merge(
    cut: Cut,
    sums: Float[Array, "chunks heads rows width"],
    stats: Float[Array, "chunks heads rows 2"],
    gate: Float[Array, "rows ..."],
    counts: Int[Array, " rows"],
    gate_columns: tuple[int, int, int] | None,
) -> Float[Array, "rows heads width"]:
    """Returns gated attention over all chunks: a kernel adds those of each row.

    Args:
      cut: sizes.
      sums: of every chunk: values times weights, the largest of which is 1.
      stats: largest score and sum of the weights of each row and chunk.
      gate: output gates before their sigmoid.
      counts: positions that each row sees; a row that sees none gets zeros.
      gate_columns: where the gates are; see `attn_decode`.
    """
    return lane_kernel(
        functools.partial(merge_kernel, ptx, cut, gate_columns or (cut.heads * WIDTH, 0, WIDTH)),
        jax.ShapeDtypeStruct((ROWS, cut.heads, WIDTH), jnp.float32),
        name="attn_decode_merge_kernel",
        grid=cut.heads * ROWS,
        warpgroups=MERGERS,
        shared=[merge_shared_bytes()],
        follows=True,
        portable=True,
    )(sums, stats, gate, counts)


def merge_shared_bytes() -> int:
    """Returns the shared memory of a block of threads of `merge_kernel`."""
    return (MERGERS - 1) * 128 * _MERGED_BYTES


def merge_kernel(isa, cut: Cut, gates_at, sums, stats, gate, counts, out, shared) -> None:
    """Runs one thread of the kernel that adds a row's chunks in order, and gates.

    Args:
      isa: instructions: `ptx`, or a model of them.
      cut: sizes.
      gates_at: `gate_columns` of `attn_decode`.
      sums: of every chunk, not yet divided by their totals.
      stats: largest score and total of each row and chunk.
      gate: output gates.
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
    carry = isa.Float(LOWEST), zero, [zero, zero]
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
    tops = [isa.select_float(inside, m, isa.Float(LOWEST)) for inside, m, *_ in parts]
    new_top = functools.reduce(isa.maximum, tops, top)
    shrink = _shrunk(isa, top, new_top)
    total, *acc = (isa.product_of(x, shrink) for x in (total, *acc))
    for inside, largest, part, values in parts:
        weight = isa.select_float(inside, _shrunk(isa, largest, new_top), isa.Float(0.0))
        total = isa.fma(weight, part, total)
        acc = [isa.fma(weight, value, x) for value, x in zip(values, acc, strict=True)]
    return new_top, total, acc


def _shrunk(isa, old, new):
    """Returns the factor of sums whose largest score was `old`: exactly 1 where it still is."""
    return isa.exp2(isa.product_of(isa.sum_of(old, -new), isa.Float(SCALE)))
