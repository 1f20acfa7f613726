"""The table of `bench.acceptance` in README.md: one row a text and sampling."""

import json
import pathlib
from typing import Any

COLUMNS = (
    "text",
    "sampling",
    "accepted at depth 5, by position",
    "tokens a cycle at depth 1 to 5",
    "accepted, list of 2,048",
    "tokens a cycle, list",
    "reached drafts: coupled / ideal / greedy",
)


def acceptance_table(results: pathlib.Path) -> str:
    """Returns a Markdown table of every device's acceptance, empty where there is none.

    Args:
      results: directory that `bench.summary.record` wrote to.
    """
    parts = []
    for path in sorted(results.glob("*/acceptance.json")):
        rows = json.loads(path.read_text())["rows"]
        lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for text, sampling in sorted({(row["text"], row["sampling"]) for row in rows}):
            found = [row for row in rows if (row["text"], row["sampling"]) == (text, sampling)]
            heads = list(dict.fromkeys(row["head"] for row in found))[:2]
            by_head = [[row for row in found if row["head"] == head] for head in heads]
            cells = [cell for depths in by_head for cell in _cells(depths)]
            lines.append(f"| {' | '.join((text, sampling, *cells, _rules(by_head[0][-1])))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(depths: list[dict[str, Any]]) -> tuple[str, str]:
    """Returns acceptance at the deepest, and tokens a cycle at every depth, in ascending order."""
    return (
        " ".join(f"{share:.2f}" for share in depths[-1]["acceptance"]),
        " ".join(f"{row['tokens_per_cycle']:.2f}" for row in depths),
    )


def _rules(row: dict[str, Any]) -> str:
    rates = [row.get(f"{rule}_mean") for rule in ("coupled", "ideal", "greedy")]
    return "" if None in rates else " / ".join(f"{rate:.2f}" for rate in rates)
