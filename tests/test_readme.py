"""What the README tells a newcomer to type works as written."""

import pathlib
import re
import shlex

import pytest

from openjet_jax.cli import _parser

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).splitlines()
    return [line for line in lines if line.startswith("openjet-jax")]


def test_the_readme_is_short_and_begins_with_a_command():
    lines = TEXT.splitlines()
    assert len(lines) < 150
    assert any(line.startswith("make demo") for line in lines[:20])


@pytest.mark.parametrize("command", commands())
def test_a_command_line_is_understood(command: str):
    args = _parser().parse_args(shlex.split(command, comments=True)[1:])
    assert args.run


@pytest.mark.parametrize("block", blocks("python"))
def test_python_examples_print_generated_text(block: str, capsys: pytest.CaptureFixture):
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 200


def test_every_path_of_the_tree_exists():
    (tree,) = blocks("text", (ROOT / "ARCHITECTURE.md").read_text())
    folder = ROOT
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if not line.startswith(" "):
            folder = ROOT / names[0]
            assert folder.exists(), line
        else:
            assert all((folder / name).exists() for name in names), line
