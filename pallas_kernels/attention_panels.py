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
"""Positions of a tile: as many as registers hold scores of; queries are read once for each tile."""

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

    def bring(self, tile, place) -> None:
        """Writes this thread's part of a tile, zeros where there is no key.

        What is copied waits where its 16-bit values will stand, which no other thread touches.

        Args:
          tile: which.
          place: address in shared memory.
        """
        raise NotImplementedError


class BfloatPanels(Panels):
    """A cache in bfloat16, copied as it is, a row by a warp."""

    parts = 1
    _AT_ONCE = 5

    def bring(self, tile, place) -> None:
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
    _ROWS, _AT_ONCE = 4, 2

    def bring(self, tile, place) -> None:
        """Takes four rows at a time; see `Panels`."""
        isa, lane, step = self.isa, self.thread & 31, self._ROWS
        # Eight neighbours take four sixteens of two rows, so that their stores meet all banks.
        row = (self.thread >> 5) * 2 + ((lane >> 2) & 1)
        sixteen = (lane & 3) + (lane >> 3) * 4
        places = [
            [place + piece_place(row + i * step, sixteen * 2 + half, TILE) for half in range(2)]
            for i in range(2)
        ]
        pieces = [
            [at + i // 2 * (2 * step * PANEL_BYTES) for at in places[i % 2]]
            for i in range(TILE // step)
        ]
        first = tile * TILE + row
        codes = isa.offset_address(self.row_of(0, first, WIDTH), sixteen, 16)
        scales = isa.offset_address(self.row_of(1, first, 2 * WIDTH // GROUP), sixteen >> 2, 4)
        for i, (own, other) in enumerate(pieces):
            position, rows = first + i * step, isa.Word(i * step)
            source = isa.offset_address(codes, rows, self.plan.kv_heads * WIDTH)
            isa.copy_async(own, source, self.chosen(position, 16, 0))
            source = isa.offset_address(scales, rows, self.plan.kv_heads * 2 * WIDTH // GROUP)
            isa.copy_async_word(other, source, self.chosen(position, 4, 0))
        isa.close_copies()
        isa.wait_copies(0)
        scale_bytes = isa.select((sixteen & 2).equals(0), 0x1010, 0x3232)
        for i in range(0, len(pieces), self._AT_ONCE):
            self._multiply(pieces[i : i + self._AT_ONCE], scale_bytes)

    def _multiply(self, pieces: list, scale_bytes) -> None:
        """Replaces codes and scales by their products."""
        isa = self.isa
        loaded = [(isa.load_shared(own, 0, 4), isa.load_shared(other)[0]) for own, other in pieces]
        for places, (codes, scale) in zip(pieces, loaded, strict=True):
            scale = isa.permute_bytes(scale, 0, scale_bytes)
            if self.are_keys:
                wide = isa.bfloat_to_float(scale, high=False)
                scale = isa.pack_halves(wide, wide)
            for half, place in enumerate(places):
                some = codes[2 * half : 2 * half + 2]
                isa.store_shared(
                    place, [self._pair(code, part, scale) for code in some for part in range(2)]
                )

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
