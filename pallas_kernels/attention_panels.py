"""Keys and values of a cache on their way to wgmma, as `attention_prefill` takes them.

A tile is `TILE` positions of one KV head: panels of 64 values a position, 128 bytes, in the order
that the tensor cores read (`piece_place`). One order serves both products, since keys are
multiplied along a position's values, and values across positions. The 64 threads of two warps bring
the tiles of one array.

Keys are made float16: they and the queries are normalised, and three bits more than bfloat16's
spare scores most of their error. Values may be of any size, and stay bfloat16.
"""

from typing import Any

from pallas_kernels.cached_rows import GROUP

WIDTH = 256
TILE = 80
"""Positions of a tile: more make better use of the queries read from shared memory, fewer hold fewer
registers."""

PANEL_BYTES = 128
PANELS = 2 * WIDTH // PANEL_BYTES
TILE_BYTES = 2 * TILE * WIDTH

_THREADS = 64


def piece_place(row, piece, rows: int):
    """Returns where 16 bytes number `piece` of a row stand in panels of so many rows, in bytes."""
    return (piece >> 3) * (rows * PANEL_BYTES) + row * PANEL_BYTES + ((piece ^ row) & 7) * 16


class Panels:
    """One thread's view of an array that two warps bring; subclasses are formats.

    Args:
      at: where the thread is; see `attention_prefill`.
      which: keys (0) or values (1).
    """

    parts: int
    """Arrays of keys, or of values: one, or codes and scales."""

    def __init__(self, at: Any, which: int):
        """Takes what the class names."""
        self.at, self.isa, self.plan = at, at.isa, at.plan
        self.arrays, self.are_keys = at.arrays[which], which == 0
        self.thread = at.thread & (_THREADS - 1)

    def row_of(self, array: int, position, row_bytes: int):
        """Returns the global address of a position's row."""
        plan, at = self.plan, self.at
        place = (at.layer * plan.capacity + position) * plan.kv_heads + at.kv_head
        return self.isa.offset_address(self.arrays[array], place, row_bytes)

    def chosen(self, position, on_true, on_false):
        """Returns one of two words: does the position hold a key that a row may see?"""
        word = self.isa.select(position < self.at.end, on_true, on_false)
        if self.plan.first:
            word = self.isa.select(position < self.plan.first, on_false, word)
        return word

    def ahead(self, tile) -> list:
        """Returns registers that are loaded before there is room for a tile."""
        del tile
        return []

    def bring(self, tile, place, ahead: list) -> list:
        """Writes this thread's part of a tile, zeros where there is no key.

        Args:
          tile: which.
          place: address in shared memory.
          ahead: of `ahead` for this tile.

        Returns:
          `ahead` of the next tile.
        """
        raise NotImplementedError


class BfloatPanels(Panels):
    """A cache in bfloat16, copied as it is, a row by a warp."""

    parts = 1
    _AT_ONCE = 5

    def bring(self, tile, place, ahead: list) -> list:
        """Copies two rows at a time; see `Panels`."""
        isa = self.isa
        piece, row = self.thread & 31, self.thread >> 5
        # Every eight rows the places of pieces repeat.
        places = [place + piece_place(row + 2 * i, piece, TILE) for i in range(4)]
        source = isa.offset_address(self.row_of(0, tile * TILE + row, 2 * WIDTH), piece, 16)
        pieces = [places[i % 4] + i // 4 * (8 * PANEL_BYTES) for i in range(TILE // 2)]
        for i, piece in enumerate(pieces):
            position = tile * TILE + (row + 2 * i)
            isa.copy_async(
                piece,
                isa.offset_address(source, isa.Word(2 * i), self.plan.kv_heads * 2 * WIDTH),
                self.chosen(position, 16, 0),
            )
        isa.close_copies()
        isa.wait_copies(0)
        if self.are_keys:
            for i in range(0, len(pieces), self._AT_ONCE):
                self._make_halves(pieces[i : i + self._AT_ONCE])
        return ahead

    def _make_halves(self, pieces: list) -> None:
        """Replaces pieces that this thread has copied by float16."""
        isa = self.isa
        loaded = [isa.load_shared(piece, 0, 4) for piece in pieces]
        for piece, words in zip(pieces, loaded, strict=True):
            pairs = [[isa.bfloat_to_float(word, high) for high in (False, True)] for word in words]
            isa.store_shared(piece, [isa.pack_halves(*pair) for pair in pairs])


class Q8Panels(Panels):
    """A cache in q8_0: codes times scales, rounded once, sixteen of a row at a time."""

    parts = 2
    _AT_ONCE = 4
    _ROWS = 4

    def _row_and_sixteen(self):
        """Returns this thread's row of four, and its sixteen codes of the row.

        Eight neighbours take 4 sixteens of two rows, so that their stores meet all banks.
        """
        lane = self.thread & 31
        row = (self.thread >> 5) * 2 + ((lane >> 2) & 1)
        return row, (lane & 3) + (lane >> 3) * 4

    def _load(self, tile, batch: int) -> list:
        """Returns codes and scales of some rows: five words each."""
        isa, words = self.isa, []
        row, sixteen = self._row_and_sixteen()
        for turn in range(self._AT_ONCE):
            position = tile * TILE + (row + self._ROWS * (batch * self._AT_ONCE + turn))
            held = self.chosen(position, position, self.at.end - 1)
            codes = isa.offset_address(self.row_of(0, held, WIDTH), sixteen, 16)
            scales = isa.offset_address(self.row_of(1, held, 2 * WIDTH // GROUP), sixteen >> 2, 4)
            (scale,) = isa.load_global(scales)
            words += [*isa.load_global(codes, 0, 4), self.chosen(position, scale, 0)]
        return words

    def ahead(self, tile) -> list:
        """Returns the first rows of a tile."""
        return self._load(tile, 0)

    def bring(self, tile, place, ahead: list) -> list:
        """Converts some rows while the next ones are loaded; see `Panels`."""
        isa, batches = self.isa, TILE // self._ROWS // self._AT_ONCE
        row, sixteen = self._row_and_sixteen()
        scale_bytes = isa.select((sixteen & 2).equals(0), 0x1010, 0x3232)
        for batch in range(batches):
            following = (tile, batch + 1) if batch + 1 < batches else (tile + 1, 0)
            words, ahead = ahead, self._load(*following)
            for turn in range(self._AT_ONCE):
                *codes, scale = words[5 * turn : 5 * turn + 5]
                scale = isa.permute_bytes(scale, 0, scale_bytes)
                if self.are_keys:
                    wide = isa.bfloat_to_float(scale, high=False)
                    scale = isa.pack_halves(wide, wide)
                pairs = [self._pair(code, half, scale) for code in codes for half in range(2)]
                at = row + self._ROWS * (batch * self._AT_ONCE + turn)
                for half in range(2):
                    target = place + piece_place(at, sixteen * 2 + half, TILE)
                    isa.store_shared(target, pairs[4 * half : 4 * half + 4])
        return ahead

    def _pair(self, codes, half: int, scale):
        """Returns two neighbouring codes times their scale."""
        isa, selector = self.isa, 0x4342 if half else 0x4140
        if self.are_keys:
            # 1024 + code + 128 in float16, less 1152.
            wide = isa.permute_bytes(codes ^ 0x80808080, 0x64646464, selector)
            return isa.multiply_halves(isa.add_halves(wide, 0xE480E480), scale)
        # 128 + 7 bits in bfloat16, less 128 or 256.
        wide = isa.permute_bytes(codes, 0, selector)
        low = isa.merge(wide, 0x007F007F, 0x43004300)
        code = isa.subtract_bfloats(low, isa.merge(wide, 0x00800080, 0x43004300))
        return isa.multiply_bfloats(code, scale)
