"""How decode products are cut up: tiles, a rule for them, and the sizes that follow."""

import dataclasses
import itertools
from typing import Literal

from pallas_kernels.decode_activations import Activations, operand_words
from pallas_kernels.decode_words import ROWS, WEIGHTS, Block

type Epilogue = Literal["none", "silu_gate"]

STAGE_BLOCKS = 4
"""Blocks of a stage, one for each warp of a warpgroup."""

GRIDS = {1: 132, 2: 132, 4: 120, 8: 120}
"""Blocks of threads that run at once, by the size of their clusters.

An H200 has room for 66 clusters of two, 30 of four, 15 of eight.
"""

SHARED_LIMIT = 232448 - 1024
"""Bytes of shared memory that a block of threads may have on sm_90."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a decode product is cut up.

    Attributes:
      warpgroups: consumers in a block of threads, 1 to 4.
      stages: stages of each consumer's ring, of four blocks of weights each.
      parts: blocks of threads that share a unit, each with a part of K.
      sharers: blocks of threads that fetch their activations together, by multicast.
      grid: blocks of threads, a multiple of `parts * sharers`, the size of a cluster.
      overlap: fill the rings before the previous kernel has ended (programmatic dependent
        launch); then no kernel may write the layer index.
    """

    warpgroups: int = 3
    stages: int = 2
    parts: int = 1
    sharers: int = 1
    grid: int = 132
    overlap: bool = False

    @property
    def cluster(self) -> int:
        """Blocks of threads of a cluster."""
        return self.parts * self.sharers

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"{self.warpgroups=} must be 1 to 4: one producer warp feeds each")
        if self.stages < 1:
            raise ValueError(f"{self.stages=} must be at least 1")
        if self.cluster not in (1, 2, 4, 8):
            raise ValueError(f"{self.parts=} times {self.sharers=} must be 1, 2, 4 or 8")
        if self.grid % self.cluster:
            raise ValueError(f"{self.grid=} must be a multiple of {self.parts=} * {self.sharers=}")


def default_tiles(block: Block, outputs: int, k: int, rows: int = 8) -> Tiles:
    """Returns the cut that the rule of thumb gives: the fewest parts of K whose activations fit.

    About 64 KB in flight in a block of threads are enough for the bandwidth, and more are worse.
    """
    # One warpgroup cannot keep up with the memory: a last resort.
    for warpgroup_counts in ((3, 2), (1,)):
        for (parts, grid), warpgroups in itertools.product(GRIDS.items(), warpgroup_counts):
            tiles = Tiles(warpgroups=warpgroups, parts=parts, grid=grid)
            cut = Cut.sized(block, tiles, "none", rows, outputs // ROWS, k)
            if k % (WEIGHTS * parts) == 0 and cut.shared_bytes <= SHARED_LIMIT:
                return tiles
    raise ValueError(f"{k=} with {rows=} fits no cut; split the matrix along k")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Static sizes of one product; `blocks` are those of one part of K of a unit.

    `units` are those that are multiplied, from `first_unit` of the matrix on.
    """

    tiles: Tiles
    block: Block
    epilogue: Epilogue
    rows: int
    units: int
    blocks: int
    operand_bytes: int
    first_unit: int = 0

    @classmethod
    def sized(cls, block: Block, tiles: Tiles, epilogue: Epilogue, rows, units, k) -> "Cut":
        """Returns the sizes of a product of `rows` by K, `units` of 16 outputs; unchecked."""
        return cls(
            tiles=tiles,
            block=block,
            epilogue=epilogue,
            rows=rows,
            units=units,
            blocks=k // WEIGHTS // tiles.parts,
            operand_bytes=operand_words(block, rows) * 4,
        )

    @classmethod
    def of(
        cls, x: Activations, weights, block: Block, tiles: Tiles, epilogue: Epilogue, first: int = 0
    ) -> "Cut":
        """Returns the sizes of a product of these operands; see `decode_product` for errors."""
        (blocks, _), (rows,), (_, units, words) = x.blocks.shape, x.scales.shape, weights.shape
        if rows not in (8, 16):
            raise ValueError(f"{rows=} must be 8 or 16; pad the activations")
        if blocks * block.words != words:
            raise ValueError(f"{words=} of a unit do not hold K={blocks * WEIGHTS} weights a row")
        if blocks % tiles.parts:
            raise ValueError(f"{blocks=} of 256 weights must split into {tiles.parts=}")
        if epilogue not in ("none", "silu_gate"):
            raise ValueError(f"{epilogue=} must be 'none' or 'silu_gate'")
        if x.operand != block.operand:
            raise ValueError(f"{x.operand=} must be {block.operand!r}; prepare them for this block")
        if first % ROWS or not 0 <= first < units * ROWS:
            raise ValueError(f"{first=} must be a multiple of {ROWS} below {units * ROWS}")
        cut = cls.sized(block, tiles, epilogue, rows, units - first // ROWS, blocks * WEIGHTS)
        cut = dataclasses.replace(cut, first_unit=first // ROWS)
        if cut.shared_bytes > SHARED_LIMIT:
            raise ValueError(
                f"{cut.shared_bytes} bytes of shared memory exceed {SHARED_LIMIT}; "
                f"take fewer stages or more parts than {tiles=}"
            )
        return cut

    @property
    def stack_units(self) -> int:
        """Units of a layer's matrix."""
        return self.first_unit + self.units

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.units * (ROWS if self.epilogue == "none" else ROWS // 2)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block.words * 4

    @property
    def steps(self) -> int:
        """Stages that a part of a unit takes."""
        return -(-self.blocks // STAGE_BLOCKS)

    @property
    def tail_blocks(self) -> int:
        """Blocks in the last of those stages."""
        return (self.blocks - 1) % STAGE_BLOCKS + 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return STAGE_BLOCKS * self.block_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, all parts of K."""
        return self.blocks * self.tiles.parts * self.block_bytes

    @property
    def workers(self) -> int:
        """Consumers of the grid, those of a unit's parts counted once."""
        return self.groups * self.tiles.warpgroups

    @property
    def groups(self) -> int:
        """Blocks of threads that take units, those of a unit's parts counted once."""
        return self.tiles.grid // self.tiles.parts

    @property
    def turns(self) -> int:
        """The most units that one consumer takes."""
        return -(-self.units // self.workers)

    @property
    def turns_of_part(self) -> int:
        """The most units of one consumer that one part adds up and stores."""
        return -(-self.turns // self.tiles.parts)

    @property
    def sums_bytes(self) -> int:
        """The sums of a unit: float32 [R / 8, 128]."""
        return self.rows // 8 * 512

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block of threads."""
        # Every buffer starts on 1,024 bytes.
        return sum(-(-words // 256) * 1024 for words in self.shared_words)

    @property
    def shared_words(self) -> list[int]:
        """Sizes of: rings, activations, warps' sums, sums of other parts, barriers."""
        tiles = self.tiles
        received = self.turns_of_part * tiles.parts if tiles.parts > 1 else 0
        barriers = tiles.warpgroups * (2 * tiles.stages + self.turns) + self.steps
        return [
            tiles.warpgroups * tiles.stages * self.stage_bytes // 4,
            self.blocks * self.operand_bytes // 4,
            tiles.warpgroups * self.sums_bytes,
            max(1, tiles.warpgroups * received * self.sums_bytes // 4),
            2 * barriers,
        ]
