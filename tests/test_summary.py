"""Figures reach the summary and the README only from the scripts that measured them."""

import json
import math
import pathlib
import subprocess
from typing import Any

import pytest

from bench.acceptance_table import acceptance_table
from bench.manifest import commit, device_folder, manifest
from bench.summary import BEGIN, END, Figure, documents, record, table, with_table

SPEED = Figure(
    name="decode", value=12.5, unit="tok/s", better="higher", must=10, share_of_limit=0.5, peer=11.0
)
FIELDS = "name value unit better must aim share_of_limit peer commit date script".split()


def test_the_manifest_says_what_ran_where():
    facts = manifest()
    assert facts["platform"] == "cpu" and facts["device"] and facts["date"].endswith("+00:00")
    assert device_folder() == "cpu"
    assert json.loads(json.dumps(facts)) == facts


def test_the_commit_is_the_repositorys():
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, text=True, capture_output=True, check=False
    )
    if done.returncode:
        assert commit() is None
    else:
        assert done.stdout.startswith((commit() or "").removesuffix("-dirty")[:10])


def test_a_recorded_figure_has_every_field(tmp_path: pathlib.Path):
    path = record("bench/decode.py", [SPEED], tmp_path)
    (figure,) = json.loads(path.read_text())
    assert list(figure) == FIELDS
    assert figure["script"] == "bench/decode.py" and figure["aim"] is None
    run = json.loads((path.parent / "decode.json").read_text())
    assert run["manifest"]["jax"] and run["figures"][0]["value"] == 12.5


def test_a_figure_measured_again_replaces_its_namesake_and_no_other(tmp_path: pathlib.Path):
    other = Figure(name="prefill", value=2.0, unit="tok/s", better="higher")
    again = Figure(name="decode", value=13.0, unit="tok/s", better="higher")
    record("bench/decode.py", [SPEED, other], tmp_path)
    path = record("bench/decode.py", [again], tmp_path)
    values = {figure["name"]: figure["value"] for figure in json.loads(path.read_text())}
    assert values == {"decode": 13.0, "prefill": 2.0}


def test_the_table_shows_bounded_figures_by_device_and_leaves_empty_columns_out(
    tmp_path: pathlib.Path,
):
    unbounded = Figure(name="size", value=3.0, unit="GB", better="lower")
    record("bench/decode.py", [unbounded], tmp_path)
    assert table(tmp_path) == ""
    record("bench/decode.py", [SPEED, unbounded], tmp_path)
    heading, _, columns, _, *rows = table(tmp_path).splitlines()
    assert heading == "**cpu**"
    assert columns == "| figure | value | must | share of limit | peer | measured by |"
    assert rows == ["| decode | 12.5 tok/s | ≥ 10 | 50% | 11 | `bench/decode.py` |"]


def test_a_missed_bound_is_marked(tmp_path: pathlib.Path):
    cases: Any = (
        ("slow", 9.0, "higher"),
        ("fast", 10.0, "higher"),
        ("late", 11.0, "lower"),
    )
    for name, value, better in cases:
        record("b.py", [Figure(name=name, value=value, unit="s", better=better, must=10)], tmp_path)
    marked = [line.split("|")[1].strip() for line in table(tmp_path).splitlines() if "✗" in line]
    assert marked == ["slow", "late"]


def test_a_document_keeps_everything_outside_its_markers():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(text, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert with_table(with_table(text, "new"), "") == f"before\n{BEGIN}\n{END}\nafter\n"
    with pytest.raises(ValueError, match="must hold"):
        with_table("no markers", "new")


@pytest.mark.parametrize(("value", "better"), [(math.nan, "higher"), (1.0, "bigger")])
def test_a_figure_that_says_nothing_is_refused(value: float, better):
    with pytest.raises(ValueError, match="speed"):
        Figure(name="speed", value=value, unit="s", better=better)


def test_documents_show_the_committed_figures():
    for path, text in documents().items():
        assert path.read_text() == text, f"{path}: run python -m bench.summary"


def test_acceptance_is_shown_by_text_and_sampling(tmp_path: pathlib.Path):
    assert acceptance_table(tmp_path) == ""
    row = {"text": "code", "sampling": "T=1", "head": "full"}
    rows = [
        row | {"depth": 1, "tokens_per_cycle": 1.75, "acceptance": [0.75]},
        row | {"depth": 2, "tokens_per_cycle": 2.25, "acceptance": [0.75, 0.5]},
    ]
    rows[1] |= {"coupled_mean": 0.5, "ideal_mean": 0.55, "greedy_mean": 0.25}
    rows += [row | {"head": "few", "depth": 1, "tokens_per_cycle": 1.5, "acceptance": [0.5]}]
    record("bench/acceptance.py", [SPEED], tmp_path, {"rows": rows})
    line = "| code | T=1 | 0.75 0.50 | 1.75 2.25 | 0.50 | 1.50 | 0.50 / 0.55 / 0.25 |"
    assert acceptance_table(tmp_path).splitlines()[2:] == [line]
