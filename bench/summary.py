"""The figures the project states: written by measuring scripts, shown in documents, never by hand.

    python -m bench.summary          rewrite tables from bench/results/*/*.json: README.md's of
                                     bounded figures on GPUs and of the acceptance of drafts, and
                                     bench/README.md's of bounded figures on CPUs
    python -m bench.summary --check  only say whether they are up to date

A script calls `record`; a figure measured again replaces the one of the same name.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, Literal

from bench.acceptance_table import acceptance_table
from bench.manifest import ROOT, device_folder, manifest

RESULTS = ROOT / "bench" / "results"
README, BENCH = ROOT / "README.md", ROOT / "bench" / "README.md"
BEGIN, END = "<!-- figures: made by bench.summary -->", "<!-- end of figures -->"
ACCEPTANCE = "<!-- acceptance: made by bench.summary -->", "<!-- end of acceptance -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number.

    Attributes:
      name: what was measured; unique on a device.
      value: the number.
      unit: of the value, such as us, tok/s, GB/s, %.
      better: whether higher or lower is better.
      must, aim: the bound and the goal set beforehand, in the same unit.
      share_of_limit: value over what the hardware allows, 1 being all of it.
      peer: the same figure of the best comparable engine, in the same unit.
    """

    name: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    must: float | None = None
    aim: float | None = None
    share_of_limit: float | None = None
    peer: float | None = None

    def __post_init__(self):
        """Raises ValueError for a value that is no number, or an unknown direction."""
        if not math.isfinite(self.value):
            raise ValueError(f"{self.name}: {self.value=} must be a finite number")
        if self.better not in ("higher", "lower"):
            raise ValueError(f"{self.name}: {self.better=} must be 'higher' or 'lower'")


def record(
    script: str,
    figures: Iterable[Figure],
    results: pathlib.Path = RESULTS,
    details: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Files figures under this machine's device, and returns the summary's path.

    `<device>/<script>.json` holds this run's manifest, figures and details; `<device>/summary.json`
    the newest figure of every name, each with its commit, date and script.

    Args:
      script: the measuring script's path in the repository, such as bench/decode.py.
      figures: what it measured.
      results: directory of all devices.
      details: what else it found, JSON-ready.
    """
    facts, measured = manifest(), [dataclasses.asdict(figure) for figure in figures]
    folder = results / device_folder()
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / f"{pathlib.Path(script).stem}.json"
    content = {"manifest": facts, "figures": measured, **(details or {})}
    run.write_text(json.dumps(content, indent=1) + "\n")
    summary = folder / "summary.json"
    kept = json.loads(summary.read_text()) if summary.exists() else []
    merged = {figure["name"]: figure for figure in kept}
    origin = {"commit": facts["commit"], "date": facts["date"], "script": script}
    merged |= {figure["name"]: figure | origin for figure in measured}
    summary.write_text(json.dumps(list(merged.values()), indent=1) + "\n")
    return summary


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(results: pathlib.Path = RESULTS, *, cpu: bool | None = None) -> str:
    """Returns a Markdown table for each device, of the figures that have a bound or a peer.

    Columns that are empty on a device are left out; without any figure the text is empty.

    Args:
      results: directory that `record` wrote to.
      cpu: whether only of CPUs, or only of others; None for all.
    """
    parts = []
    for path in sorted(results.glob("*/summary.json")):
        if cpu not in (None, path.parent.name == "cpu"):
            continue
        figures = json.loads(path.read_text())
        rows = [_row(f) for f in figures if (f["must"], f["aim"], f["peer"]) != (None, None, None)]
        columns = [name for name in COLUMNS if any(row[name] for row in rows)]
        lines = [columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)]
        if rows:
            text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            parts.append(f"**{path.parent.name}**\n\n{text}")
    return "\n\n".join(parts)


COLUMNS = ("figure", "value", "must", "aim", "share of limit", "peer", "measured by")


def _row(figure: dict[str, Any]) -> dict[str, str]:
    share = figure["share_of_limit"]
    if figure["unit"].startswith("%"):  # the value itself
        share = None
    least = "≥ " if figure["better"] == "higher" else "≤ "
    must, aim = (figure[name] for name in ("must", "aim"))
    cells = (
        figure["name"],
        f"{_number(figure['value'])} {figure['unit']}",
        "" if must is None else least + _number(must) + " ✗" * _missed(figure),
        "" if aim is None else least + _number(aim),
        "" if share is None else f"{share:.0%}",
        _number(figure["peer"]),
        f"`{figure['script']}`",
    )
    return dict(zip(COLUMNS, cells, strict=True))


def _missed(figure: dict[str, Any]) -> bool:
    """Returns whether a figure misses the bound that it must keep."""
    value, must = figure["value"], figure["must"]
    return value < must if figure["better"] == "higher" else value > must


def with_table(text: str, figures: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """Returns a document with what stands between two markers replaced.

    Args:
      text: a Markdown document.
      figures: the new table.
      markers: lines before and after it.

    Raises:
      ValueError: the document lacks the markers.
    """
    begin, end = markers
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the document must hold {begin!r} and {end!r} once each")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    inside = f"\n\n{figures}\n\n" if figures else "\n"
    return before + begin + inside + end + after


def documents(results: pathlib.Path = RESULTS) -> dict[pathlib.Path, str]:
    """Returns the documents with their tables made again from the results."""
    readme = with_table(README.read_text(), table(results, cpu=False))
    return {
        README: with_table(readme, acceptance_table(results), ACCEPTANCE),
        BENCH: with_table(BENCH.read_text(), table(results, cpu=True)),
    }


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the tables from measured figures.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail when one is old")
    check = parser.parse_args().check
    old = {path: text for path, text in documents().items() if path.read_text() != text}
    if not check:
        for path, text in old.items():
            path.write_text(text)
    elif old:
        names = " and ".join(str(path.relative_to(ROOT)) for path in old)
        print(f"tables of {names} are not up to date: run python -m bench.summary", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
