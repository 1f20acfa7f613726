"""The matrices through which the rows of a chunk meet, for a prompt's DeltaNet on sm_90 GPUs.

A kernel takes a chunk of 64 rows, for one key head and the value heads p that read it. It does not
need the state, so all chunks go at once. With the running sum G of g in the chunk:

    A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j)                 j < i
    solve   = (I + A)^-1 diag(beta)
    scores  = (q_i . k_j) exp(G_i - G_j)                        j <= i

and the decays exp(G_i) and exp(G_last - G_i). Chunk 0 holds the pending rows, padded by neutral
ones: k = v = g = beta = 0 changes no state. (I + A)^-1 comes from substitution in float32: a
product of A's powers would be shorter, but on equal keys its terms reach 1e17 and cancel.

Yang et al., "Gated Delta Networks" (2024), with the WY form's U and W left out: the scan applies
`solve` to the residual V - exp(G) K S, which is one product fewer and half the memory.
"""

import dataclasses

from pallas_kernels.delta_rule import CHUNK
from pallas_kernels.deltanet_decode import Columns
from pallas_kernels.deltanet_layer import Sizes
from pallas_kernels.split_tiles import Image, Left, RightOfRows, multiply, split

WIDTH = 128
TAPS = 4
MOST_GROUPS = 4
THREADS = 128
"""Threads of a block, of every kernel here: four warps."""

KEYS = Image(rows=CHUNK, columns=WIDTH)
MIX = Image(rows=CHUNK, columns=CHUNK)

KEYS_BYTES = 2 * KEYS.bytes
"""Of a chunk of a key head: keys, then queries."""

MIX_BYTES = 2 * MIX.bytes + 2 * CHUNK * 4
"""Of a chunk of a value head: solve, scores, and the two decays of each row."""

SPLITS = 2
"""Blocks of the scan that share the columns of a state."""

VALUES_BYTES = CHUNK * WIDTH // SPLITS * 4
"""Of a chunk of a block of the scan."""

SOLVE_AT, SCORES_AT, GROWN_AT, TAIL_AT = 0, MIX.bytes, 2 * MIX.bytes, 2 * MIX.bytes + CHUNK * 4

LEAST_LOG_DECAY = -64.0
"""Lower ones become this: exp(-64) = 2e-28 forgets as well, and running sums keep their digits."""

# Words from one column of A to the next: lanes of a warp then store to 32 different banks.
_STRIDE = CHUNK + 4
_SYSTEM_BYTES = CHUNK * _STRIDE * 4


def value_offset(row, column):
    """Returns the byte offset of a value of a chunk, for integers or registers.

    Eight columns of rows 0, 2, 4 and 6, which a warp loads at once, stand in 32 different banks.
    """
    return row * (WIDTH // SPLITS * 4) + (column ^ (((row >> 1) & 3) << 3)) * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes of a prompt's layer.

    Attributes:
      sizes: of the layer.
      rows: of the prompt's part, a multiple of `CHUNK`.
      pending_rows: rows that the memory has for pending ones, at most `CHUNK`.
      columns: where the projections are in their matrices.
    """

    sizes: Sizes
    rows: int
    pending_rows: int
    columns: Columns

    @property
    def chunks(self) -> int:
        """Chunks, that of the pending rows included."""
        return self.rows // CHUNK + 1

    @property
    def groups(self) -> int:
        """Value heads of a key head."""
        return self.sizes.value_heads // self.sizes.key_heads

    @property
    def heads(self) -> int:
        """Heads of queries, keys and values together."""
        return 2 * self.sizes.key_heads + self.sizes.value_heads


class MixMemory:
    """Byte offsets in a block's shared memory; systems replace the keys and queries."""

    def __init__(self, groups: int):
        """Lays out what `groups` value heads need."""
        self.keys = self.systems = 0
        self.sums = max(KEYS_BYTES, groups * _SYSTEM_BYTES)
        self.strengths = self.sums + groups * CHUNK * 4
        self.ready = self.strengths + groups * CHUNK * 4
        self.bytes = self.ready + 16


class _Mix:
    """Where a thread is: a block takes a chunk of one key head, a warp 16 of its rows."""

    def __init__(self, isa, plan: Plan, *refs):
        self.isa, self.plan = isa, plan
        *inputs, mixes, shared = refs
        self.images, self.g, self.beta = (isa.global_address(ref) for ref in inputs)
        self.mixes = isa.global_address(mixes)
        self.memory = MixMemory(plan.groups)
        self.shared = isa.shared_address(shared)
        self.thread = isa.thread_index()
        self.warp, self.lane = isa.uniform(self.thread >> 5), self.thread & 31
        block = isa.block_index()
        self.chunk, self.key_head = block % plan.chunks, block // plan.chunks
        # The two columns and the upper of two rows whose sums `ptx.mma` leaves with a thread.
        self.row, self.column = self.warp * 16 + (self.lane >> 2), (self.lane & 3) * 2

    def value_head(self, group):
        """Returns the index of a value head that reads this key head."""
        return group * self.plan.sizes.key_heads + self.key_head

    def mix(self, group):
        """Returns the global address of what this block makes for a value head."""
        index = self.value_head(group) * self.plan.chunks + self.chunk
        return self.isa.offset_address(self.mixes, index, MIX_BYTES)

    def system(self, group):
        """Returns the shared address of minus A, by columns, of a value head."""
        return self.shared + self.memory.systems + group * _SYSTEM_BYTES

    def row_floats(self, at: int, group):
        """Returns the shared address of 64 floats of a value head."""
        return self.shared + at + group * (4 * CHUNK)


def mix_kernel(isa, plan: Plan, *refs) -> None:
    """Runs one thread of the kernel that makes a chunk's matrices.

    Args:
      isa: instructions: `ptx`, or a model of them.
      plan: sizes.
      *refs: images, g, beta, results and shared memory.
    """
    at = _Mix(isa, plan, *refs)
    ready = at.shared + at.memory.ready
    with isa.when(at.thread.equals(0)):
        isa.barrier_init(ready, 1)
        isa.fence_barriers()
        isa.barrier_expect(ready, KEYS_BYTES)
        index = at.key_head * plan.chunks + at.chunk
        source = isa.offset_address(at.images, index, KEYS_BYTES)
        isa.copy_bulk_cached(at.shared + at.memory.keys, source, KEYS_BYTES, ready)
    with isa.when(at.warp < plan.groups):
        _sum_decays(at)
    isa.sync_threads(0, THREADS)
    isa.barrier_wait(ready, isa.Word(0))
    products = _products(at)
    isa.sync_threads(0, THREADS)

    def weigh(group, carry):
        _weigh(at, group, *products)
        return carry

    # A count that the compiler cannot see keeps the loops: unrolled, they run out of registers.
    groups = isa.uniform(isa.Word(plan.groups))
    isa.loop(0, groups, 1, [], weigh)
    isa.sync_threads(0, THREADS)
    # Columns from 32 on take a quarter of the work: the last warp has those of all heads.
    with isa.when(at.warp < plan.groups):
        _solve(at, at.warp, 0)

    def solve_rest(group, carry):
        _solve(at, group, CHUNK // 2)
        return carry

    with isa.when(at.warp.equals(3)):
        isa.loop(0, groups, 1, [], solve_rest)


def _sum_decays(at: _Mix) -> None:
    """Leaves running sums of g, and beta, in shared memory; a warp takes one value head."""
    isa, heads = at.isa, at.plan.sizes.value_heads
    first = (at.chunk * CHUNK + at.lane * 2) * heads + at.value_head(at.warp)
    g, beta = (
        [isa.load_global_floats(isa.offset_address(p, first, 4), 4 * heads * o)[0] for o in (0, 1)]
        for p in (at.g, at.beta)
    )
    g = [isa.maximum(x, isa.Float(LEAST_LOG_DECAY)) for x in g]
    total = isa.sum_of(*g)
    for distance in (1, 2, 4, 8, 16):
        other = isa.shuffle(total, at.lane - distance)
        other = isa.select_float(at.lane < distance, isa.Float(0.0), other)
        total = isa.sum_of(total, other)
    before = isa.shuffle(total, at.lane - 1)
    before = isa.select_float(at.lane < 1, isa.Float(0.0), before)
    sums = [isa.sum_of(before, g[0]), total]
    last = isa.shuffle(total, at.lane | 31)
    for name, values in ((at.memory.sums, sums), (at.memory.strengths, beta)):
        isa.store_shared(at.row_floats(name, at.warp) + at.lane * 8, values)
    place = isa.offset_address(at.mix(at.warp), at.lane, 8)
    isa.store_global(place, [isa.exp(x) for x in sums], GROWN_AT)
    isa.store_global(place, [isa.exp(isa.sum_of(last, -x)) for x in sums], TAIL_AT)


def _products(at: _Mix):
    """Returns this warp's rows of K K^T and Q K^T, eight tiles of sums each."""
    isa, base = at.isa, at.shared + at.memory.keys
    right = RightOfRows(isa, KEYS, base, at.lane)
    lefts = [Left(isa, KEYS, base + place, at.lane, at.warp * 16) for place in (0, KEYS.bytes)]
    tiles = CHUNK // 8
    products = [[[isa.Float(0.0)] * 4 for _ in range(tiles)] for _ in lefts]
    for step in range(WIDTH // 16):
        rows = [left.load(step) for left in lefts]
        for pair in range(0, tiles, 2):
            columns, places = right.load(step, pair // 2), slice(pair, pair + 2)
            sums = [total for product in products for total in product[places]]
            sums = multiply(isa, [left for left in rows for _ in columns], 2 * columns, sums)
            for product, new in zip(products, (sums[:2], sums[2:]), strict=True):
                product[places] = new
    return products


def _weigh(at: _Mix, group, keys, queries) -> None:
    """Leaves minus A of a value head in shared memory, and stores its scores."""
    isa = at.isa
    sums_at, strengths_at = (
        at.row_floats(name, group) for name in (at.memory.sums, at.memory.strengths)
    )
    rows = [at.row, at.row + 8]
    row_sums, strengths = (
        [isa.load_shared_floats(place + row * 4)[0] for row in rows]
        for place in (sums_at, strengths_at)
    )
    scores = at.mix(group)
    first = MIX.offset(at.row, at.column)
    for tile, (key_sums, query_sums) in enumerate(zip(keys, queries, strict=True)):
        column = at.column + 8 * tile
        column_sums = isa.load_shared_floats(sums_at + at.column * 4, 32 * tile, 2)
        place = isa.offset_address(scores, first ^ (tile << 4), 1)
        for lower, row in enumerate(rows):
            weighed = []
            for odd in (0, 1):
                i = 2 * lower + odd
                reached = (column + odd) < row + 1
                exponent = isa.sum_of(row_sums[lower], -column_sums[odd])
                # Exponents above the diagonal are positive and may overflow.
                decay = isa.exp(isa.select_float(reached, exponent, isa.Float(0.0)))
                entry = isa.product_of(isa.product_of(key_sums[i], decay), -strengths[lower])
                entry = isa.select_float((column + odd) < row, entry, isa.Float(0.0))
                address = at.system(group) + ((column + odd) * _STRIDE + row) * 4
                isa.store_shared(address, [entry])
                score = isa.product_of(query_sums[i], decay)
                weighed.append(isa.select_float(reached, score, isa.Float(0.0)))
            # Rows 8 apart are swizzled alike.
            offset = SCORES_AT + 8 * lower * MIX.row_bytes
            high, low = split(isa, *weighed)
            isa.store_global(place, [high], offset)
            isa.store_global(place, [low], offset + MIX.plane_bytes)


def _solve(at: _Mix, group, first: int) -> None:
    """Stores 32 columns of (I + A)^-1 diag(beta) from one on, a column a lane.

    Rows above the first are zero and not stored: nobody reads them.
    """
    isa, size, column = at.isa, CHUNK - first, at.lane + first
    system = at.system(group)
    one, zero = isa.Float(1.0), isa.Float(0.0)
    values = [isa.select_float(at.lane.equals(i), one, zero) for i in range(size)]
    for k in range(size - 1):
        for quad in range((k + 1) // 4 * 4, size, 4):
            offset = 4 * ((first + k) * _STRIDE + first + quad)
            factors = isa.load_shared_floats(system, offset, 4)
            for i, factor in enumerate(factors, quad):
                if i > k:
                    values[i] = isa.fma(factor, values[k], values[i])
    (strength,) = isa.load_shared_floats(at.row_floats(at.memory.strengths, group) + column * 4)
    is_odd = (at.lane & 1).equals(1)
    # An even lane stores the high parts of its column and the next, an odd one the low parts.
    start = MIX.offset(isa.Word(0), column & 0xFFFFFFFE)
    start = start + isa.select(is_odd, MIX.plane_bytes, 0)
    places = [isa.offset_address(at.mix(group), start ^ (i << 4), 1) for i in range(8)]
    for i, value in enumerate(values):
        value = isa.product_of(value, strength)
        other = isa.shuffle_xor(value, 1)
        pair = isa.select_float(is_odd, other, value), isa.select_float(is_odd, value, other)
        high, low = split(isa, *pair)
        row = first + i
        word = isa.select(is_odd, low, high)
        isa.store_global(places[row % 8], [word], SOLVE_AT + row * MIX.row_bytes)
