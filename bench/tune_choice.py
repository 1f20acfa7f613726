"""What a tuner of decode products decides by: the products, the cuts worth trying, who wins.

Nothing here needs a GPU. `tune.py` measures; what `kernels.py --sweep` recorded is read here.
"""

import collections
import dataclasses
import itertools
import json
import pathlib
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from bench import head
from bench.kernels import CASES, FORMAT_CASES, Case
from bench.manifest import ROOT
from pallas_kernels.decode_cuts import GRIDS, Tiles
from pallas_kernels.tile_choice import Product, Winner

MARGIN = 0.02
"""What a winner saves of the default's time, at least."""

ROUNDS = 2

FORMER_NAMES = {"q6k_head": "q6k_head_logits"}
"""Cases that recorded sweeps know by another name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A product to find a cut for.

    Attributes:
      case: its name and sizes.
      choosing: the head that it is, if it chooses as it multiplies.
    """

    case: Case
    choosing: head.HeadCase | None = None

    @property
    def product(self) -> Product:
        """What its winner is looked up by."""
        case, chooses = self.case, self.choosing is not None
        return Product(
            block=case.block,
            outputs=case.outputs,
            k=case.k,
            rows=case.rows,
            epilogue="choice" if chooses else case.epilogue,
        )


SUBJECTS = [Subject(case=case) for case in CASES + FORMAT_CASES] + [
    Subject(
        case=Case(name=c.name, block=c.block, outputs=c.outputs, k=c.k, rows=c.rows), choosing=c
    )
    for c in head.CASES
    # The others have the same weights, and so the same cut.
    if not c.adjusted and not c.candidates
]


def candidates(product: Product) -> list[Tiles]:
    """Returns the cuts worth trying beside the default, those most like it first."""
    default, found = product.default, []
    for sharers, warpgroups, stages in itertools.product((1, 2, 4), (3, 2, 4), (2, 1, 3, 4)):
        if (cluster := default.parts * sharers) not in GRIDS:
            continue
        full = Tiles(
            warpgroups=warpgroups,
            stages=stages,
            parts=default.parts,
            sharers=sharers,
            grid=GRIDS[cluster],
        )
        # The smallest grid whose busiest consumer takes no more units; far fewer cannot keep up.
        cut = product.cut(full)
        groups = -(-cut.units // (cut.turns * warpgroups))
        even = -(-groups // sharers) * cluster
        grids = [full.grid, even] if 3 * full.grid < 4 * even < 4 * full.grid else [full.grid]
        found += [dataclasses.replace(full, grid=grid) for grid in grids]
    fits = [cut for cut in found if cut != default and product.objection(cut) is None]
    fields = dataclasses.asdict(default)
    return sorted(
        fits, key=lambda cut: sum(fields[k] != v for k, v in dataclasses.asdict(cut).items())
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was measured of a cut.

    Attributes:
      tiles: the cut.
      us: its kernel time in each round, in microseconds.
      default_us: that of the default, measured beside it.
    """

    tiles: Tiles
    us: tuple[float, ...]
    default_us: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Its time over the default's, in the round where that is largest."""
        return max(us / default for us, default in zip(self.us, self.default_us, strict=True))


def choose(
    compared: Iterable[Comparison], noise: float = 0.0, rounds: int = ROUNDS
) -> Comparison | None:
    """Returns the winner among cuts, or None where the default stays.

    Args:
      compared: cuts that are right.
      noise: by how much the default differs from itself, as a share.
      rounds: in how many rounds a winner must have been measured.
    """
    bound = 1 - max(MARGIN, noise)
    faster = [cut for cut in compared if len(cut.us) >= rounds and cut.worst < bound]
    return min(faster, key=lambda cut: cut.worst, default=None)


def spread(times: Sequence[float]) -> float:
    """Returns by how much equal measurements differ, as a share of their median."""
    return (max(times) - min(times)) / statistics.median(times)


def winner_of(product: Product, cut: Comparison, commit: str | None, date: str) -> Winner:
    """Returns the entry of a cut that won."""
    return Winner(
        product=product,
        tiles=cut.tiles,
        us=round(statistics.median(cut.us), 3),
        default_us=round(statistics.median(cut.default_us), 3),
        commit=commit,
        date=date,
    )


def document(device: str, about: str, winners: Iterable[Winner]) -> str:
    """Returns the text of a device's file."""
    entries = sorted((w.entry() for w in winners), key=lambda e: tuple(map(str, e.values())))
    return json.dumps({"device": device, "about": about, "winners": entries}, indent=1) + "\n"


def from_sweeps(paths: Sequence[pathlib.Path]) -> tuple[str, str, list[Winner]]:
    """Returns device, account and winners of sweeps that `kernels.py --sweep` recorded.

    A cut must have beaten the default by 2 % in every sweep that measured both. A sweep says that
    both were right; it has no second round.
    """
    subjects = {subject.case.name: subject for subject in SUBJECTS}
    compared: dict[str, dict[Tiles, Comparison]] = collections.defaultdict(dict)
    seen, origins, device = set(), {}, ""
    for path in paths:
        sweep = json.loads(path.read_text())
        device = sweep.get("device") or sweep["manifest"]["device"]
        times: dict[str, dict[Tiles, float]] = collections.defaultdict(dict)
        for row in sweep["rows"]:
            if row["right"]:
                name: str = row["name"]
                name = FORMER_NAMES.get(name, name)
                times[name][_recorded_tiles(row["tiles"])] = row["us"]
        for name, cuts in times.items():
            product = subjects[name].product
            seen.add(name)
            if (default_us := cuts.get(product.default)) is None:
                continue
            origins[name] = _origin(path, sweep)
            compared[name] |= {
                tiles: _added(compared[name].get(tiles), tiles, us, default_us)
                for tiles, us in cuts.items()
                if tiles != product.default and product.objection(tiles) is None
            }
    winners = []
    for name, cuts in compared.items():
        if cut := choose(cuts.values(), rounds=1):
            winners.append(winner_of(subjects[name].product, cut, *origins[name]))
    tried = {name: len(cuts) for name, cuts in compared.items() if cuts}
    about = (
        f"From {', '.join(path.name for path in paths)}, of the kernel as it was then. "
        f"The default rule came from these sweeps: {sum(tried.values())} cuts with its parts of K "
        f"were measured beside it, of {len(tried)} products ({', '.join(sorted(tried))}), and "
        f"{len(winners) or 'none'} of these have a cut that beat it by more than {MARGIN:.0%}."
    )
    if left := sorted(seen - tried.keys()):
        about += f" Swept without the default of today: {', '.join(left)}."
    return device, about, winners


def _recorded_tiles(fields: dict[str, Any]) -> Tiles:
    """Returns the cut of a row; the first sweeps call parts of K a cluster."""
    fields = dict(fields)
    if "cluster" in fields:
        fields["parts"] = fields.pop("cluster")
    return Tiles(**fields)


def _added(known: Comparison | None, tiles: Tiles, us: float, default_us: float) -> Comparison:
    us_before, default_before = (known.us, known.default_us) if known else ((), ())
    return Comparison(tiles=tiles, us=(*us_before, us), default_us=(*default_before, default_us))


def _origin(path: pathlib.Path, sweep: dict[str, Any]) -> tuple[str | None, str]:
    """Returns commit and date of a sweep: its own, or those of the commit that brought it."""
    if found := sweep.get("manifest"):
        return found["commit"], found["date"]
    command = ["git", "log", "-1", "--format=%h %cI", "--", str(path)]
    commit, date = subprocess.check_output(command, cwd=ROOT, text=True).split()
    return commit, date
