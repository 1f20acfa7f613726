"""Tiles of a cache on their way to the tensor cores, as `attention_decode` takes them.

A tile is `TILE` positions of one KV head. Threads copy it into a stage of shared memory as it lies
in the cache; `SHARES` groups of warps take `SPAN` positions of it each. The order of the values
that a product sums over is free, and so is that of its columns: a format picks the orders in which
a thread's words of the cache are its fragments, and writes queries, or names columns, accordingly.

Sixteen bytes number c of row r stand in place c ^ (r % 8) of the row, so that eight rows of a
column lie in different banks.
"""

from typing import Any

from pallas_kernels.cached_rows import GROUP

ROWS = 8
"""Rows of a cycle."""

WIDTH = 256
TILE = 32
SHARES = 2
SPAN = TILE // SHARES
"""Positions of a share: the depth of one matrix product."""

WARPS = 8
_QUERY_BYTES = 2 * WIDTH
"""A row of queries in shared memory, 16 bits a value."""


def _rows_of(base, row, half, row_bytes: int) -> list:
    """Returns addresses of a lane's sixteen bytes in a row, by their pair's place modulo 8.

    The pair's place beyond 8 is an offset of 128 bytes for every 8.
    """
    place = half ^ (row & 7)
    return [base + row * row_bytes + (place ^ low) * 16 for low in (0, 2, 4, 6)]


class Tiles:
    """One thread's view of the tiles of a chunk; subclasses are formats.

    Args:
      at: where the thread is; see `attention_decode`.
      cache: global addresses of the cache's arrays.
    """

    stages: int
    stage_bytes: int
    query_parts: int
    """How many 16-bit numbers a query is made of."""

    row_bytes: int
    """A row of keys, or of values."""

    def __init__(self, at: Any, cache: tuple):
        """Takes what the class names."""
        self.at, self.isa, self.cut = at, at.isa, at.cut
        self.cache = cache

    @classmethod
    def query_bytes(cls, group: int) -> int:
        """Returns the shared memory of the queries of a KV head's group of heads."""
        return cls.query_parts * group * ROWS * _QUERY_BYTES

    def load_queries(self) -> None:
        """Writes the queries to shared memory in the order of this format's products."""
        at, isa = self.at, self.isa
        quads = self.cut.group * ROWS * WIDTH // 4
        for turn in range(quads // (32 * WARPS)):
            index = at.thread + turn * (32 * WARPS)
            row, quad = index // (WIDTH // 4), index % (WIDTH // 4)
            # Row m of the matrix is row m % 8 of head m / 8.
            head = at.kv_head * self.cut.group + (row >> 3)
            place = ((row & 7) * self.cut.heads + head) * (WIDTH // 4) + quad
            x = isa.load_global_floats(isa.offset_address(at.q, place, 16), 0, 4)
            self.store_query(at.queries + row * _QUERY_BYTES, row & 7, quad, x)

    def query_rows(self) -> list:
        """Returns this lane's addresses of the queries of its warp's sixteen rows."""
        lane = self.at.lane
        row = self.at.row_tile * 16 + (lane & 15)
        return _rows_of(self.at.queries, row, lane >> 4, _QUERY_BYTES)

    def key_rows(self, keys) -> list:
        """Returns this lane's addresses of the keys of eight positions: four pairs at once."""
        row, quarter = self.at.lane & 7, self.at.lane >> 3
        return [keys + row * self.row_bytes + ((quarter ^ row) ^ low) * 16 for low in (0, 4)]

    def share_of(self, stage):
        """Returns where the keys of this warp's share of a stage begin; values lie a tile on."""
        return stage + self.at.share * (SPAN * self.row_bytes)

    def copy_rows(self, first, stage, array: int, target: int) -> None:
        """Starts copies of a tile's rows of one array of the cache; zeros where there is no key."""
        at, isa, row_bytes = self.at, self.isa, self.row_bytes
        pieces = row_bytes // 16
        for turn in range(TILE * pieces // (32 * WARPS)):
            index = at.thread + turn * (32 * WARPS)
            row, piece = index // pieces, index % pieces
            source = self.source(array, first + row, row_bytes)
            place = stage + target + row * row_bytes + (piece ^ (row & 7)) * 16
            source = isa.offset_address(source, piece, 16)
            isa.copy_async(place, source, self.held_bytes(first + row))

    def source(self, array: int, position, row_bytes: int):
        """Returns the global address of a position's row."""
        at, isa, heads = self.at, self.isa, self.cut.kv_heads
        place = (at.layer * self.cut.capacity + position) * heads + at.kv_head
        return isa.offset_address(self.cache[array], place, row_bytes)

    def held_bytes(self, position):
        """Returns how many of 16 bytes to read: none where there is no key."""
        size = self.isa.select(position < self.at.end, 16, 0)
        if self.cut.first:
            size = self.isa.select(position < self.cut.first, 0, size)
        return size

    def store_query(self, place, swizzle, quad, x) -> None:
        """Stores values 4 `quad` to 4 `quad` + 3 of a row of queries."""
        raise NotImplementedError

    def fetch(self, first, stage) -> None:
        """Starts the copies of the tile at a position into a stage."""
        raise NotImplementedError

    def scores(self, stage) -> list[list]:
        """Returns queries times keys: for every 8 positions the accumulators of `ptx.mma`."""
        raise NotImplementedError

    def add_values(self, stage, weights: list[list], sums: list[list]) -> None:
        """Adds weights times values to the sums: 32 accumulators of `ptx.mma`."""
        raise NotImplementedError

    def column(self, n: int, i: int) -> tuple[int, int]:
        """Returns (a, b): element i (0 or 1) of sum n is value a t + b in lane 4 g + t."""
        raise NotImplementedError


class BfloatTiles(Tiles):
    """A cache in bfloat16: keys and values are fragments as they are."""

    stages, query_parts, row_bytes = 5, 2, 2 * WIDTH
    stage_bytes = 2 * TILE * row_bytes

    def store_query(self, place, swizzle, quad, x) -> None:
        """Stores values rounded to bfloat16, and what the rounding left."""
        isa = self.isa
        place = place + ((quad >> 1) ^ swizzle) * 16 + (quad & 1) * 8
        rounded = [isa.pack_bfloats(*x[:2]), isa.pack_bfloats(*x[2:])]
        left = [
            isa.sum_of(value, -isa.bfloat_to_float(rounded[i // 2], high=i % 2 == 1))
            for i, value in enumerate(x)
        ]
        isa.store_shared(place, rounded)
        left = [isa.pack_bfloats(*left[:2]), isa.pack_bfloats(*left[2:])]
        isa.store_shared(place, left, self.query_bytes(self.cut.group) // 2)

    def fetch(self, first, stage) -> None:
        """Starts the copies of keys, then values."""
        for array in range(2):
            self.copy_rows(first, stage, array, array * TILE * self.row_bytes)

    def scores(self, stage) -> list[list]:
        """Returns queries times keys; rounding queries to bfloat16 alone would cost 1.6e-3."""
        isa, lost = self.isa, self.query_bytes(self.cut.group) // 2
        queries, keys = self.query_rows(), self.key_rows(self.share_of(stage))
        scores = [[isa.Float(0.0)] * 4 for _ in range(SPAN // 8)]
        for pair in range(WIDTH // 32):
            left = [
                [isa.load_matrices(queries[step % 4], step // 4 * 128 + part) for part in (0, lost)]
                for step in (2 * pair, 2 * pair + 1)
            ]
            for n in range(len(scores)):
                offset = n * 8 * self.row_bytes + pair // 2 * 128
                right = isa.load_matrices(keys[pair % 2], offset)
                for i in range(2):
                    for part in left[i]:
                        fragment = right[2 * i : 2 * i + 2]
                        scores[n] = isa.mma(part, fragment, scores[n], kind="bf16")
        return scores

    def add_values(self, stage, weights, sums) -> None:
        """Adds weights, rounded to bfloat16, times values."""
        isa, lane = self.isa, self.at.lane
        values = self.share_of(stage) + TILE * self.row_bytes
        rows = _rows_of(values, lane & 15, lane >> 4, self.row_bytes)
        left = [isa.pack_bfloats(*weights[i // 2][2 * (i % 2) :][:2]) for i in range(4)]
        for pair in range(WIDTH // 16):
            right = isa.load_matrices(rows[pair % 4], pair // 4 * 128, transposed=True)
            for i in range(2):
                n = 2 * pair + i
                sums[n] = isa.mma(left, right[2 * i : 2 * i + 2], sums[n], kind="bf16")

    def column(self, n: int, i: int) -> tuple[int, int]:
        """Returns the order of the cache."""
        return 2, 8 * n + i


class Q8Tiles(Tiles):
    """A cache in q8_0: codes become floats on the way into the products, which are exact in them.

    Scales of keys multiply the sums over a group; those of values the weights of its positions.
    """

    stages, query_parts, row_bytes = 8, 1, WIDTH
    _scales_at = 2 * TILE * WIDTH
    _scale_bytes = 2 * WIDTH // GROUP
    stage_bytes = _scales_at + 2 * TILE * _scale_bytes

    def store_query(self, place, swizzle, quad, x) -> None:
        """Stores values in float16 so that a thread's four neighbouring codes meet theirs."""
        isa = self.isa
        # Of sixteen values, number 4 t + 2 h + e is stored as number 8 h + 2 t + e.
        sixteen, t = quad >> 2, quad & 3
        for half in range(2):
            at = place + ((sixteen * 2 + half) ^ swizzle) * 16 + t * 4
            isa.store_shared(at, [isa.pack_halves(*x[2 * half :][:2])])

    def fetch(self, first, stage) -> None:
        """Starts the copies of codes, then of scales."""
        at, isa = self.at, self.isa
        for which, array in enumerate((0, 2)):
            self.copy_rows(first, stage, array, which * TILE * self.row_bytes)
        row = at.thread % TILE
        for which, array in enumerate((1, 3)):
            with isa.when(at.warp.equals(which)):
                place = stage + self._scales_at + (which * TILE + row) * self._scale_bytes
                source = self.source(array, first + row, self._scale_bytes)
                isa.copy_async(place, source, self.held_bytes(first + row))

    def _scales(self, stage, which: int) -> list[list]:
        """Returns words of scales for this lane's two positions of every eight, in a share."""
        at, isa = self.at, self.isa
        row = which * TILE + at.share * SPAN + (at.lane & 3) * 2
        address = stage + self._scales_at + row * self._scale_bytes
        return [
            isa.load_shared_floats(address, (8 * n + e) * self._scale_bytes, 4)
            for n in range(SPAN // 8)
            for e in range(2)
        ]

    def _scale(self, words: list, group: int):
        word = self.isa.as_word(words[group // 2])
        return self.isa.bfloat_to_float(word, high=group % 2 == 1)

    def scores(self, stage) -> list[list]:
        """Returns queries times keys, a group's sum at a time."""
        isa = self.isa
        scales = self._scales(stage, 0)
        queries, keys = self.query_rows(), self.key_rows(self.share_of(stage))
        scores = [[isa.Float(0.0)] * 4 for _ in range(SPAN // 8)]
        for quarter in range(4):
            steps = [4 * quarter + i for i in range(4)]
            left = [isa.load_matrices(queries[step % 4], step // 4 * 128) for step in steps]
            for n in range(len(scores)):
                offset = n * 8 * self.row_bytes + quarter // 2 * 128
                words = isa.load_matrices(keys[quarter % 2], offset)
                for group in (2 * quarter, 2 * quarter + 1):
                    part = [isa.Float(0.0)] * 4
                    for step in (2 * (group % 2), 2 * (group % 2) + 1):
                        right = self._halves(words[step])
                        part = isa.mma(left[step], right, part, kind="f16")
                    scores[n] = [
                        isa.fma(part[i], self._scale(scales[2 * n + i % 2], group), scores[n][i])
                        for i in range(4)
                    ]
        return scores

    def _halves(self, word) -> list:
        """Returns four neighbouring codes as float16: 1024 + code + 128, less 1152."""
        isa = self.isa
        word = word ^ 0x80808080
        return [
            isa.add_halves(isa.permute_bytes(word, 0x64646464, selector), 0xE480E480)
            for selector in (0x4140, 0x4342)
        ]

    def _bfloats(self, word) -> list:
        """Returns codes 0 and 2, and 1 and 3, as bfloat16: 128 + 7 bits, less 128 or 256."""
        isa, pairs = self.isa, []
        for selector in (0x4240, 0x4341):
            wide = isa.permute_bytes(word, 0, selector)
            low = isa.merge(wide, 0x007F007F, 0x43004300)
            pairs.append(isa.subtract_bfloats(low, isa.merge(wide, 0x00800080, 0x43004300)))
        return pairs

    def add_values(self, stage, weights, sums) -> None:
        """Adds weights times scales, rounded to bfloat16, times codes."""
        isa, lane = self.isa, self.at.lane
        values = self.share_of(stage) + TILE * self.row_bytes
        rows = _rows_of(values, lane & 15, lane >> 4, self.row_bytes)
        scales = self._scales(stage, 1)
        for group in range(WIDTH // GROUP):
            scaled = [
                [
                    isa.product_of(weight, self._scale(scales[2 * n + i % 2], group))
                    for i, weight in enumerate(weights[n])
                ]
                for n in range(2)
            ]
            left = [isa.pack_bfloats(*scaled[i // 2][2 * (i % 2) :][:2]) for i in range(4)]
            words = isa.load_matrices(rows[group % 4], group // 4 * 128, transposed=True)
            for sixteen in range(2):
                first, second = (self._bfloats(word) for word in words[2 * sixteen :][:2])
                for odd in range(2):
                    n = 4 * group + 2 * sixteen + odd
                    right = [first[odd], second[odd]]
                    sums[n] = isa.mma(left, right, sums[n], kind="bf16")

    def column(self, n: int, i: int) -> tuple[int, int]:
        """Returns the order in which bytes of a pair part: even ones, then odd ones."""
        return 4, 16 * (n // 2) + n % 2 + 2 * i
