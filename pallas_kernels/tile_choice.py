"""Cuts of decode products on a device: winners of measurements, and the rule of thumb elsewhere.

`tuned_tiles/<device>.json` holds the winners; `bench/tune.py` writes it. A winner changes how a
product is fed and never how K is cut: the order in which an output is summed depends on the parts
of K alone, and every winner keeps those that the rule gives its matrix. So a winner changes no bit,
and joined matrices agree with separate ones, and cycles of all depths, as they do without winners.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import SHARED_LIMIT, Cut, Epilogue, Tiles, default_tiles
from pallas_kernels.decode_words import ROWS, WEIGHTS, Block

type Ending = Epilogue | Literal["choice"]
"""What is made of the outputs; "choice" is the head that chooses as it multiplies."""

FOLDER = pathlib.Path(__file__).parent / "tuned_tiles"

TUNED = ("warpgroups", "stages", "parts", "sharers", "grid")
"""Fields of `Tiles` that a winner names; `overlap` depends on what stands around a product."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """What a winner is looked up by.

    Attributes:
      block: kind of block, by the name of its format.
      outputs, k: rows and columns of the weights that are multiplied.
      rows: of the activations, 8 or 16.
      epilogue: what is made of the outputs.
    """

    block: str
    outputs: int
    k: int
    rows: int
    epilogue: Ending

    def __post_init__(self):
        """Raises ValueError for a product that no kernel makes."""
        if self.block not in BLOCKS:
            raise ValueError(f"{self.block=} must be one of {', '.join(BLOCKS)}")
        if self.outputs < ROWS or self.outputs % ROWS:
            raise ValueError(f"{self.outputs=} must be a positive multiple of {ROWS}")
        if self.rows not in (8, 16):
            raise ValueError(f"{self.rows=} must be 8 or 16")
        if self.epilogue not in ("none", "silu_gate", "choice"):
            raise ValueError(f"{self.epilogue=} must be 'none', 'silu_gate' or 'choice'")

    @property
    def default(self) -> Tiles:
        """The cut of the rule of thumb."""
        return default_tiles(BLOCKS[self.block], self.outputs, self.k, self.rows)

    def cut(self, tiles: Tiles) -> Cut:
        """Returns the sizes of the product under a cut; unchecked."""
        return Cut.sized(BLOCKS[self.block], tiles, "none", self.rows, self.outputs // ROWS, self.k)

    def objection(self, tiles: Tiles) -> str | None:
        """Returns why a cut may not stand in for the default, or None where it may."""
        default, cut = self.default, self.cut(tiles)
        if tiles.overlap:
            return f"{tiles.overlap=} must be left to whoever launches the product"
        if tiles.parts != default.parts:
            return f"{tiles.parts=} must be the default's {default.parts}, or bits change"
        if self.k % (WEIGHTS * tiles.parts):
            return f"{self.k=} must split into {tiles.parts=} of whole blocks"
        if cut.shared_bytes > SHARED_LIMIT:
            return f"{cut.shared_bytes} bytes of shared memory exceed {SHARED_LIMIT}"
        if self.epilogue == "choice" and cut.workers != self.cut(default).workers:
            return (
                f"{cut.workers=} must be the default's {self.cut(default).workers}: each adds up "
                "the exponentials of its own columns, so the log-sum-exp would change"
            )
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Winner:
    """A cut that was measured to be faster than the default.

    Attributes:
      product: what it is for.
      tiles: the cut.
      us, default_us: kernel times of it and of the default, in microseconds.
      commit, date: of the measurement; None where the sources were no repository.
    """

    product: Product
    tiles: Tiles
    us: float
    default_us: float
    commit: str | None
    date: str

    def __post_init__(self):
        """Raises ValueError for a cut that may not stand in for the default, or is no faster."""
        if objection := self.product.objection(self.tiles):
            raise ValueError(objection)
        if self.tiles == self.product.default:
            raise ValueError(f"{self.tiles} is the default")
        if not 0 < self.us < self.default_us:
            raise ValueError(f"{self.us=} must be less than {self.default_us=}")

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Winner":
        """Returns the winner of an entry of a file.

        Raises:
          ValueError: it is none.
        """
        fields = {field.name for field in dataclasses.fields(Product)}
        try:
            given = dict(entry)
            product = Product(**{name: given.pop(name) for name in fields & given.keys()})
            tiles = given.pop("tiles")
            if tiles.keys() != set(TUNED):
                raise ValueError(f"tiles must name {', '.join(TUNED)}, not {', '.join(tiles)}")
            return cls(product=product, tiles=Tiles(**tiles), **given)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{entry} is no winner: {error}") from error

    def entry(self) -> dict[str, Any]:
        """Returns the winner as `of` takes it, JSON-ready."""
        fields = dataclasses.asdict(self)
        tiles = {name: fields["tiles"][name] for name in TUNED}
        return fields.pop("product") | fields | {"tiles": tiles}


def device_file(device: str) -> str:
    """Returns the name of a device's file, such as nvidia_h200.json."""
    return "".join(c if c.isalnum() else "_" for c in device.lower()) + ".json"


def read_winners(path: pathlib.Path) -> dict[Product, Winner]:
    """Returns the winners of a file by product.

    Raises:
      ValueError: not a file of winners, an entry that is none, or a second one for a product.
    """
    winners: dict[Product, Winner] = {}
    try:
        for entry in json.loads(path.read_text())["winners"]:
            winner = Winner.of(entry)
            if winner.product in winners:
                raise ValueError(f"{winner.product} has two winners")
            winners[winner.product] = winner
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}; run bench/tune.py again") from error
    return winners


@functools.cache
def winners_on(device: str) -> dict[Product, Winner]:
    """Returns the winners of a device, none where nobody has measured."""
    path = FOLDER / device_file(device)
    return read_winners(path) if path.exists() else {}


def tiles_for(
    block: Block, outputs: int, k: int, rows: int, epilogue: Ending, device: str
) -> Tiles:
    """Returns the winner of a product on a device, or the default where there is none.

    Args:
      block: kind of block.
      outputs: rows of the weights that are multiplied.
      k: columns of the weights.
      rows: of the activations, 8 or 16.
      epilogue: what is made of the outputs.
      device: as JAX calls its kind, such as "NVIDIA H200".

    Raises:
      ValueError: no cut fits, or the device's file holds what is no winner.
    """
    product = Product(block=block.format.name, outputs=outputs, k=k, rows=rows, epilogue=epilogue)
    winner = winners_on(device).get(product)
    return winner.tiles if winner else default_tiles(block, outputs, k, rows)
