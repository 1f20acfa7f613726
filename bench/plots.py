"""Pictures of what was measured, as SVG beside the JSON they are drawn from.

    python -m bench.plots            draw them again
    python -m bench.plots --check    only say whether they are up to date

`context.svg` is decoding by context (`decode.json`: plain, drafts, and the peer's where there is
one; median and interval), `acceptance.svg` the drafts accepted by position and class
(`article.json`), and `phases.svg` a cycle's time by phase (`phases.json`).
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from bench.summary import RESULTS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 56, 168, 34, 42
COLOURS = ("#3b6ea8", "#c2622d", "#4c8c4a", "#8a5aa5", "#8c8c8c", "#b3a12f")
STYLE = (
    "text{font:12px sans-serif;fill:#444}.title{font-size:14px;font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One series: a name, and (label, value, low, high) of each point."""

    name: str
    points: Sequence[tuple[str, float, float, float]]


def line_chart(title: str, unit: str, x_name: str, lines: Sequence[Line]) -> str:
    """Returns an SVG of values over labels, equally far apart, with their intervals.

    Args:
      title: above it.
      unit: of the values.
      x_name: what the labels are.
      lines: the series; labels are in the order of their first use.
    """
    labels = list(dict.fromkeys(label for line in lines for label, *_ in line.points))
    top = _round_up(max(high for line in lines for *_, high in line.points))
    step = (WIDTH - LEFT - RIGHT) / max(len(labels) - 1, 1)
    at = {label: LEFT + i * step for i, label in enumerate(labels)}

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, title, "start", "title")]
    for tick in range(5):
        value = top * tick / 4
        parts.append(
            f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#8884" stroke-width="1"/>'
        )
        parts.append(_text(LEFT - 6, y(value) + 4, f"{value:g}", "end"))
    parts += [_text(x, HEIGHT - BOTTOM + 18, label, "middle") for label, x in at.items()]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, f"{x_name} ({unit})", "middle"))
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        path = "L".join(f"{at[label]:.1f} {y(value):.1f}" for label, value, *_ in line.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for label, value, low, high in line.points:
            x = at[label]
            parts.append(
                f'<path d="M{x:.1f} {y(low):.1f}V{y(high):.1f}" stroke="{colour}"/>'
                f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="3" fill="{colour}">'
                f"<title>{escape(line.name)}, {escape(label)}: {value:.3g} ({low:.3g} to"
                f" {high:.3g})</title></circle>"
            )
        parts.append(_legend(i, line.name, colour))
    return _svg(title, parts)


def bar_chart(title: str, unit: str, bars: Sequence[tuple[str, float]]) -> str:
    """Returns an SVG of one row a bar, longest first.

    Args:
      title: above it.
      unit: of the values.
      bars: names and values.
    """
    ordered = sorted(bars, key=lambda bar: -bar[1])
    most, total = ordered[0][1], sum(value for _, value in ordered)
    height = (HEIGHT - TOP) / len(ordered)
    parts = [_text(LEFT, 20, title, "start", "title")]
    for i, (name, value) in enumerate(ordered):
        y, width = TOP + i * height, value / most * (WIDTH - 2 * RIGHT)
        parts.append(
            f'<rect x="{RIGHT}" y="{y:.1f}" width="{width:.1f}" height="{height * 0.7:.1f}"'
            f' fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(RIGHT - 6, y + height * 0.5, name, "end"))
        label = f"{value:.3g} {unit}, {value / total:.0%}"
        parts.append(_text(RIGHT + width + 6, y + height * 0.5, label, "start"))
    return _svg(title, parts)


def context_chart(found: dict[str, Any]) -> str | None:
    """Returns decoding by context, of `decode.json`."""
    plain = [(_short(row["context"]), *_interval(row["plain"])) for row in found["contexts"]]
    lines = [Line(name="plain", points=plain)]
    deepest = max((row["depth"] for row in found["depths"]), default=0)
    drafts = [
        (_short(row["context"]), *_interval(row["rate"]))
        for row in found["depths"]
        if row["depth"] == deepest
    ]
    if drafts:
        lines.append(Line(name=f"depth {deepest}", points=drafts))
    for engine, depth in sorted({_peer(row) for row in found["peers"]}):
        rows = [row for row in found["peers"] if _peer(row) == (engine, depth)]
        points = [(_short(row["context"]), *_interval(row["rate"])) for row in rows]
        name = f"{engine}{f', depth {depth}' if depth else ''}"
        lines.append(Line(name=name, points=points))
    return line_chart(_title("Decoding by context", found), "tokens a second", "context", lines)


def _peer(row: dict[str, Any]) -> tuple[str, int]:
    """Returns a row's engine and depth."""
    return row.get("engine", "llama.cpp"), row["depth"]


def acceptance_chart(found: dict[str, Any]) -> str | None:
    """Returns acceptance by position and class, of `article.json`."""
    lines = [
        Line(
            name=row["class"],
            points=[
                (str(position), *_interval(accepted))
                for position, accepted in enumerate(row["acceptance"], start=1)
            ],
        )
        for row in found["rows"]
    ]
    title = _title(f"Drafts accepted at depth {found['depth']}", found)
    return line_chart(title, "share of verified drafts", "position of the draft", lines)


def phase_chart(found: dict[str, Any]) -> str | None:
    """Returns a cycle's time by phase, of `phases.json`."""
    bars = [(row["phase"], row["us"]) for row in found["phases"]]
    return bar_chart(_title(f"A cycle at depth {found['depth']}", found), "us", bars)


CHARTS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "decode": context_chart,
    "article": acceptance_chart,
    "phases": phase_chart,
}
NAMES = {"decode": "context", "article": "acceptance", "phases": "phases"}


def drawings(results: pathlib.Path = RESULTS) -> dict[pathlib.Path, str]:
    """Returns the text of every picture, by the file it belongs in.

    Args:
      results: directory of all devices.
    """
    found = {}
    for script, chart in CHARTS.items():
        for path in sorted(results.glob(f"*/{script}.json")):
            if text := chart(json.loads(path.read_text())):
                found[path.parent / f"{NAMES[script]}.svg"] = text
    return found


def _title(what: str, found: dict[str, Any]) -> str:
    name = pathlib.Path(found["model"]).stem
    return f"{what}: {name}, {found['manifest']['device']}"


def _interval(found: dict[str, float]) -> tuple[float, float, float]:
    return found["value"], found["low"], found["high"]


def _short(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)


def _round_up(value: float) -> float:
    """Returns the next number of one or two digits, so that four ticks are round."""
    scale = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 1.0
    return next(
        n * scale for n in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12) if n * scale >= value
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _legend(row: int, name: str, colour: str) -> str:
    x, y = WIDTH - RIGHT + 16, TOP + 10 + 20 * row
    mark = f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
    return mark + _text(x + 16, y, name, "start")


def _svg(title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Draw what was measured.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail when it is old")
    check, old = parser.parse_args().check, []
    for path, text in drawings().items():
        if not path.exists() or path.read_text() != text:
            old.append(path)
            if not check:
                path.write_text(text)
    if check and old:
        print(f"{old[0].name} is not up to date: run python -m bench.plots", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
