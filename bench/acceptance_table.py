"""The table of `bench.acceptance` in README.md: one row a text, sampling and draft head."""

import json
import pathlib
from typing import Any

COLUMNS = (
    "text",
    "sampling",
    "draft head",
    "accepted at depth 5, by position",
    "tokens a cycle at depth 1 to 5",
    "a reached draft survives: coupled / ideal / greedy draft",
)


def acceptance_table(results: pathlib.Path) -> str:
    """Returns a Markdown table of every device's acceptance, empty where there is none.

    Args:
      results: directory that `bench.summary.record` wrote to.
    """
    parts = []
    for path in sorted(results.glob("*/acceptance.json")):
        lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        settings: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        for found in json.loads(path.read_text())["rows"]:
            key = (found["text"], found["sampling"], found["head"])
            settings.setdefault(key, {})[found["depth"]] = found
        lines += [f"| {' | '.join((*key, *_cells(settings[key])))} |" for key in sorted(settings)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(depths: dict[int, dict[str, Any]]) -> tuple[str, str, str]:
    deepest = depths[max(depths)]
    rules = [deepest.get(f"{rule}_mean") for rule in ("coupled", "ideal", "greedy")]
    return (
        " ".join(f"{share:.2f}" for share in deepest["acceptance"]),
        " ".join(f"{depths[depth]['tokens_per_cycle']:.2f}" for depth in sorted(depths)),
        "" if None in rules else " / ".join(f"{rate:.2f}" for rate in rules),
    )
