"""`.ci/setup.sh --find`: which Python a fresh machine gets, and what it says without one."""

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / ".ci" / "setup.sh"
SHELL_TOOLS = ("sh", "dirname", "cut")


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> pathlib.Path:
    """A machine with a shell, no Python, and an empty home; commands go into its bin folder."""
    (tmp_path / "bin").mkdir()
    for tool in SHELL_TOOLS:
        path = shutil.which(tool)
        assert path is not None
        (tmp_path / "bin" / tool).symlink_to(path)
    return tmp_path


def install(path: pathlib.Path, answer: str) -> str:
    """Puts a stand-in for an interpreter at path: it answers the script's probe, or fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\n" if answer else "#!/bin/sh\nexit 127\n")
    path.chmod(0o755)
    return str(path)


def find(machine: pathlib.Path, **env: str) -> subprocess.CompletedProcess:
    env = {"PATH": str(machine / "bin"), "HOME": str(machine), **env}
    return subprocess.run(
        [str(SCRIPT), "--find"], env=env, text=True, capture_output=True, timeout=30
    )


def test_a_python_on_the_path_is_taken(machine: pathlib.Path):
    python = install(machine / "bin" / "python3", "3.12.4 ok")
    assert find(machine).stdout.strip() == python


def test_an_old_python3_is_passed_over_for_a_new_one(machine: pathlib.Path):
    install(machine / "bin" / "python3", "3.11.2 old")
    python = install(machine / "bin" / "python3.13", "3.13.0 ok")
    assert find(machine).stdout.strip() == python


@pytest.mark.parametrize("root", ["elsewhere", ".pyenv"])
def test_pyenv_versions_are_found_where_the_shim_refuses(machine: pathlib.Path, root: str):
    install(machine / "bin" / "python3.12", "")
    install(machine / root / "versions" / "3.11.7" / "bin" / "python3", "3.11.7 old")
    python = install(machine / root / "versions" / "3.12.1" / "bin" / "python3", "3.12.1 ok")
    env = {} if root == ".pyenv" else {"PYENV_ROOT": str(machine / root)}
    assert find(machine, **env).stdout.strip() == python


def test_uv_provides_a_python_where_there_is_none(machine: pathlib.Path):
    python = install(machine / "managed" / "python3.12", "3.12.9 ok")
    install(machine / "bin" / "uv", python)
    assert find(machine).stdout.strip() == python


def test_a_named_python_is_taken_before_all_others(machine: pathlib.Path):
    install(machine / "bin" / "python3", "3.12.4 ok")
    python = install(machine / "mine" / "python", "3.14.0 ok")
    assert find(machine, PYTHON=python).stdout.strip() == python


def test_a_named_python_that_will_not_do_is_an_error_and_not_replaced(machine: pathlib.Path):
    install(machine / "bin" / "python3", "3.12.4 ok")
    python = install(machine / "mine" / "python", "3.10.1 old")
    done = find(machine, PYTHON=python)
    assert done.returncode == 1 and f"{python}: Python 3.10.1, too old" in done.stderr


def test_where_nothing_is_found_every_place_that_was_searched_is_named(machine: pathlib.Path):
    python = install(machine / "bin" / "python3", "3.9.2 old")
    shim = install(machine / "bin" / "python3.12", "")
    done = find(machine)
    assert done.returncode == 1 and done.stdout == ""
    for part in (
        "needs Python 3.12 or newer",
        f"{python}: Python 3.9.2, too old",
        f"{shim}: does not run",
        "python3.13: not on PATH",
        f"{machine}/.pyenv/versions: not there",
        "uv: not on PATH",
        "make demo PYTHON=",
    ):
        assert part in done.stderr


def test_a_python_without_venv_is_named_with_the_package_to_install(machine: pathlib.Path):
    install(machine / "bin" / "python3", "3.13.5 no-venv")
    done = find(machine)
    assert done.returncode == 1
    assert "apt-get install python3.13-venv" in done.stderr


def test_a_real_interpreter_answers_the_probe(tmp_path: pathlib.Path):
    done = subprocess.run([str(SCRIPT), "--find"], env=os.environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert pathlib.Path(done.stdout.strip()).exists()
