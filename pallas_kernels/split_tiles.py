"""Matrices in pairs of bfloat16, for products on the tensor cores nearly as exact as float32.

x = high + low, both bfloat16, is good to 2^-17 of x. A product is three: low high + high low + high
high; what is left out, low low, is of the same size. TF32 would take two products and be good to
2^-11. A matrix stands in memory as an image: a plane of high parts, then one of low ones. A row of
a plane is contiguous but for its 16-byte pieces: piece c of row r stands at place c ^ (r % 8), so
that eight rows of one piece lie in eight different banks.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """Layout of a matrix; it begins at a multiple of 256 bytes of shared memory.

    Attributes:
      rows: a multiple of 16.
      columns: 64 or 128.
    """

    rows: int
    columns: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of one plane."""
        return 2 * self.columns

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane: how far a low part is from its high part."""
        return self.rows * self.row_bytes

    @property
    def bytes(self) -> int:
        """Bytes of both planes."""
        return 2 * self.plane_bytes

    def offset(self, row, column):
        """Returns the byte offset of an element's high part, for integers or registers."""
        piece = (column >> 3) ^ (row & 7)
        return row * self.row_bytes + (piece << 4) + (column & 7) * 2


def split(isa, first, second):
    """Returns the high parts and the low parts of a pair of floats, a word each."""
    high = isa.pack_bfloats(first, second)
    rests = [value - isa.bfloat_to_float(high, odd) for odd, value in enumerate((first, second))]
    return high, isa.pack_bfloats(*rests)


def fragment(isa, left, right):
    """Returns high and low words of a left-hand matrix [16, 16], of two tiles of `ptx.mma` results.

    Sums of one product are so the operand of the next, without leaving their thread.
    """
    pairs = [split(isa, *tile[2 * i : 2 * i + 2]) for tile in (left, right) for i in (0, 1)]
    return [high for high, _ in pairs], [low for _, low in pairs]


def multiply(isa, lefts, rights, sums):
    """Returns each `left @ right + sum` of high and low fragments, as `ptx.mma` lays them out.

    The three products of one sum wait for one another; those of the other sums stand between them.
    """
    terms = list(zip(lefts, rights, strict=True))
    for a, b in ((1, 0), (0, 1), (0, 0)):
        sums = [
            isa.mma(left[a], right[b], total, "bf16")
            for (left, right), total in zip(terms, sums, strict=True)
        ]
    return sums


class _Reader:
    """Loads fragments of an image in shared memory, all lanes of a warp together."""

    transposed = False

    def __init__(self, isa, image: Image, base, row, piece):
        self.isa, self.image = isa, image
        self.start = base + row * image.row_bytes + ((piece ^ (row & 7)) << 4)

    def _load(self, column_step: int, row_step: int):
        """Returns high and low words, 16 columns and 16 rows on for each step."""
        # Pieces differ in bits that a swizzle flips alike: the step is one exclusive or.
        address, offset = self.start ^ (32 * column_step), 16 * self.image.row_bytes * row_step
        return [
            self.isa.load_matrices(address, offset + plane, self.transposed)
            for plane in (0, self.image.plane_bytes)
        ]


def _pair(words):
    """Returns two right-hand fragments, high and low each, of the words of four 8x8 matrices."""
    high, low = words
    return [(high[2 * i : 2 * i + 2], low[2 * i : 2 * i + 2]) for i in (0, 1)]


class Left(_Reader):
    """An image [m, k] as the left-hand matrix, from some row on."""

    def __init__(self, isa, image: Image, base, lane, first_row):
        """Takes the image's address and the first of 16 rows, a multiple of 8."""
        super().__init__(isa, image, base, first_row + (lane & 15), lane >> 4)

    def load(self, step: int):
        """Returns the fragment of 16 columns."""
        return self._load(step, 0)


class RightOfRows(_Reader):
    """An image [n, k] as the right-hand matrix [k, n]: its rows are the columns."""

    def __init__(self, isa, image: Image, base, lane):
        """Takes the image's address."""
        row = (lane & 7) + ((lane >> 4) << 3)
        super().__init__(isa, image, base, row, (lane >> 3) & 1)

    def load(self, step: int, pair: int):
        """Returns fragments of 16 of k: for 8 rows of the image, and for the next 8."""
        return _pair(self._load(step, pair))


class RightOfColumns(_Reader):
    """An image [k, n] as the right-hand matrix that it is."""

    transposed = True

    def __init__(self, isa, image: Image, base, lane):
        """Takes the image's address."""
        super().__init__(isa, image, base, lane & 15, lane >> 4)

    def load(self, step: int, pair: int):
        """Returns fragments of 16 rows: for 8 columns of the image, and for the next 8."""
        return _pair(self._load(pair, step))
