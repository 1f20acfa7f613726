"""Keys and values of a cache on their way to wgmma, of a prompt and of a cycle.

A tile is some positions of one KV head: panels of 64 values a position, 128 bytes, in the order
that the tensor cores read (`piece_place`). One order serves both products, since keys are
multiplied along a position's values, and values across positions. A few warps bring the tiles of
one array.

Keys are made float16: they and the queries are normalised, and three bits more than bfloat16's
spare scores most of their error. Values may be of any size, and stay bfloat16.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from pallas_kernels.cached_rows import GROUP

WIDTH = 256

SCALE = math.log2(math.e) / math.sqrt(WIDTH)
"""Of scores: softmax is taken to base 2."""

LOWEST = -1e30
"""A largest score before there is one."""

TILE = 80
"""Positions of a prompt's tile: as many as registers hold scores of; queries are read once for each
tile."""

PANEL_BYTES = 128
PANELS = 2 * WIDTH // PANEL_BYTES
TILE_BYTES = 2 * TILE * WIDTH


def piece_place(row, piece, rows: int):
    """Returns where 16 bytes number `piece` of a row stand in panels of so many rows, in bytes."""
    return (piece >> 3) * (rows * PANEL_BYTES) + row * PANEL_BYTES + ((piece ^ row) & 7) * 16


def bring_queries(
    isa,
    rows: Iterable[Any],
    source_of: Callable[[Any], Any],
    place_of: Callable[[Any], Any],
    at_once: int,
) -> None:
    """Writes this thread's pieces of the queries to shared memory, rounded to float16.

    Args:
      isa: instructions: `ptx`, or a model of them.
      rows: of which it has eight values each.
      source_of: the global address of those of a row.
      place_of: their address in shared memory.
      at_once: pieces that wait for memory together.
    """
    for some in itertools.batched(rows, at_once):
        loaded = []
        for source in map(source_of, some):
            loaded.append(
                isa.load_global_floats(source, 0, 4) + isa.load_global_floats(source, 16, 4)
            )
        for row, x in zip(some, loaded, strict=True):
            words = [isa.pack_halves(*x[i : i + 2]) for i in range(0, 8, 2)]
            isa.store_shared(place_of(row), words)


class Panels:
    """One thread's view of an array that some warps bring; subclasses are formats.

    Args:
      at: where the thread is; see `attention_prefill` and `attention_decode`.
      which: keys (0) or values (1).
      positions: of a tile, a multiple of 16.
      warps: 2 or 4 neighbours; the first one's number is a multiple of theirs.
      at_once: pieces that wait for shared memory together, as many as registers hold.
    """

    parts: int
    """Arrays of keys, or of values: one, or codes and scales."""

    _AT_ONCE: int

    def __init__(
        self,
        at: Any,
        which: int,
        positions: int = TILE,
        warps: int = 2,
        at_once: int | None = None,
    ):
        """Takes what the class names."""
        self.at, self.isa, self.plan = at, at.isa, at.plan
        self.arrays, self.are_keys = at.arrays[which], which == 0
        self.positions, self.warps, self.at_once = positions, warps, at_once or self._AT_ONCE
        self.thread = at.thread & (32 * warps - 1)

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

    def bring(self, first, place) -> None:
        """Writes this thread's part of a tile, zeros where there is no key.

        Args:
          first: the tile's first position.
          place: address in shared memory.
        """
        self.fetch(first, place)
        self.isa.close_copies()
        self.isa.wait_copies(0)
        self.convert(place)

    def fetch(self, first, place) -> None:
        """Starts this thread's copies of a tile; see `bring`.

        What is copied waits where its 16-bit values will stand, which no other thread touches.
        """
        raise NotImplementedError

    def convert(self, place) -> None:
        """Makes 16-bit values of what this thread has copied, once it has arrived."""
        raise NotImplementedError


class BfloatPanels(Panels):
    """A cache in bfloat16, copied as it is, a row by a warp."""

    parts = 1
    _AT_ONCE = 5

    def _places(self, place) -> list:
        """Returns the addresses of this thread's pieces of a tile."""
        step = self.warps
        # Every eight rows the places of pieces repeat.
        turns = 8 // step
        piece, row = self.thread & 31, self.thread >> 5
        places = [place + piece_place(row + step * i, piece, self.positions) for i in range(turns)]
        return [
            places[i % turns] + i // turns * (8 * PANEL_BYTES)
            for i in range(self.positions // step)
        ]

    def fetch(self, first, place) -> None:
        """Copies a row by every warp at a time; see `Panels`."""
        isa, step = self.isa, self.warps
        piece, row = self.thread & 31, self.thread >> 5
        source = isa.offset_address(self.row_of(0, first + row, 2 * WIDTH), piece, 16)
        for i, target in enumerate(self._places(place)):
            isa.copy_async(
                target,
                isa.offset_address(source, isa.Word(step * i), self.plan.kv_heads * 2 * WIDTH),
                self.chosen(first + (row + step * i), 16, 0),
            )

    def convert(self, place) -> None:
        """Makes keys float16; values stay as they are."""
        if self.are_keys:
            pieces = self._places(place)
            for i in range(0, len(pieces), self.at_once):
                self._make_halves(pieces[i : i + self.at_once])

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
    _AT_ONCE = 2

    def _row_and_sixteen(self) -> tuple:
        """Returns this thread's first row of a tile, and which sixteen values of it."""
        lane = self.thread & 31
        # Eight neighbours take four sixteens of two rows, so that their stores meet all banks.
        return (self.thread >> 5) * 2 + ((lane >> 2) & 1), (lane & 3) + (lane >> 3) * 4

    def _places(self, place) -> list[list]:
        """Returns both addresses of each sixteen that this thread makes of a tile."""
        (row, sixteen), step = self._row_and_sixteen(), 2 * self.warps
        turns = 8 // step
        places = [
            [
                place + piece_place(row + i * step, sixteen * 2 + half, self.positions)
                for half in range(2)
            ]
            for i in range(turns)
        ]
        return [
            [at + i // turns * (8 * PANEL_BYTES) for at in places[i % turns]]
            for i in range(self.positions // step)
        ]

    def fetch(self, first, place) -> None:
        """Copies two rows by every warp at a time; see `Panels`.

        A row's scales are 16 bytes: one thread copies them for the others of its warp, to where its
        own second eight values will stand.
        """
        isa, (row, sixteen), step = self.isa, self._row_and_sixteen(), 2 * self.warps
        first, row_bytes = first + row, self.plan.kv_heads * WIDTH
        codes = isa.offset_address(self.row_of(0, first, WIDTH), sixteen, 16)
        scales = self.row_of(1, first, 2 * WIDTH // GROUP)
        for i, (own, other) in enumerate(self._places(place)):
            rows, num_bytes = isa.Word(i * step), self.chosen(first + i * step, 16, 0)
            isa.copy_async(own, isa.offset_address(codes, rows, row_bytes), num_bytes)
            with isa.when(sixteen.equals(0)):
                source = isa.offset_address(scales, rows, 2 * row_bytes // GROUP)
                isa.copy_async(other, source, num_bytes)

    def convert(self, place) -> None:
        """Replaces codes and scales by their products."""
        isa, (row, sixteen), pieces = self.isa, self._row_and_sixteen(), self._places(place)
        scale_bytes = isa.select((sixteen & 2).equals(0), 0x1010, 0x3232)
        # Where the row's first thread has put the scales: its second piece.
        step = 2 * self.warps
        second = isa.Word(1)
        turns = [piece_place(row + i * step, second, self.positions) for i in range(8 // step)]
        words = [place + turn + (sixteen >> 2) * 4 for turn in turns]
        isa.sync_warp()
        for i in range(0, len(pieces), self.at_once):
            some = range(i, min(i + self.at_once, len(pieces)))
            scales = [words[n % len(words)] + n // len(words) * (8 * PANEL_BYTES) for n in some]
            self._multiply([pieces[n] for n in some], scales, scale_bytes)

    def _multiply(self, pieces: list, scales: list, scale_bytes) -> None:
        """Makes values of some sixteens, of scales at some addresses."""
        isa = self.isa
        loaded = [
            (isa.load_shared(own, 0, 4), isa.load_shared(scale)[0])
            for (own, _), scale in zip(pieces, scales, strict=True)
        ]
        # Scales stand where a neighbour's values will.
        isa.sync_warp()
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
