"""Panels of lines on logarithmic axes, as one SVG file; no plotting library is needed."""

import dataclasses
import html
import math
import pathlib
from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 380, 300, 64, 34, 16, 30


@dataclasses.dataclass(frozen=True)
class Line:
    """A named line of (x, y) points, all positive."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines that share axes; `unit` follows the numbers of the vertical one."""

    title: str
    unit: str
    lines: list[Line]


def draw(path: pathlib.Path, title: str, panels: list[Panel], columns: int) -> None:
    """Writes the panels, row by row."""
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, rows * HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="24" font-size="15">{html.escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        x, y = i % columns * WIDTH, i // columns * HEIGHT + 40
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _panel(panel: Panel) -> list[str]:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    ys = [y for line in panel.lines for _, y in line.points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 0.05)
    low, high = (low, high) if high > low else (low - 1, high + 1)
    near, far = math.log2(xs[0]), math.log2(xs[-1])
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x) - near) / (far - near) if far > near else 0.5
        up = (math.log10(y) - low) / (high - low)
        return LEFT + along * across, TOP + (1 - up) * down

    parts = [f'<text x="{LEFT}" y="{TOP - 10}" font-size="13">{html.escape(panel.title)}</text>']
    for power in range(low, high + 1):
        _, y = place(xs[0], 10.0**power)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        label = f"{_number(power)}{panel.unit}"
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for x in xs:
        across_x, _ = place(x, ys[0])
        parts.append(
            f'<text x="{across_x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        )
    for i, line in enumerate(panel.lines):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line.points)
        dashes = ' stroke-dasharray="5 3"' if i % 2 else ""
        stroke = f'stroke="{line.color}" stroke-width="2"{dashes}'
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        parts.append(
            f'<text x="{LEFT + 8}" y="{TOP + 12 + 14 * i}" fill="{line.color}">'
            f"{html.escape(line.name)}</text>"
        )
    return parts


def _number(power: int) -> str:
    """Returns a power of ten, short."""
    for size, suffix in ((9, "G"), (6, "M"), (3, "k")):
        if power >= size:
            return f"{10 ** (power - size)}{suffix}"
    return f"{10.0**power:g}"
