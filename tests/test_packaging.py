"""What an installation consists of, seen by someone who only has the wheel."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from pallas_kernels.tile_choice import FOLDER

ROOT = pathlib.Path(__file__).parents[1]


def python(
    code: str, cwd: pathlib.Path, path: pathlib.Path | str = ""
) -> subprocess.CompletedProcess:
    """Runs code in a fresh interpreter that sees only `path` and the installed dependencies."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, text=True, capture_output=True, timeout=120
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds the wheel from a copy of the sources, so that no build/ left here leaks into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for name in ("openjet_jax", "pallas_kernels", "convert"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(out)!r})"
    done = python(build, source)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_the_model_and_no_top_level_convert(wheel: pathlib.Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in (
        ("openjet_jax", "openjet_jax"),
        ("openjet_jax/convert", "convert"),
        ("openjet_jax/server", "openjet_jax/server"),
        ("pallas_kernels", "pallas_kernels"),
    ):
        assert {f"{package}/{path.name}" for path in (ROOT / folder).glob("*.py")} <= names
    assert {"openjet_jax/py.typed", "pallas_kernels/py.typed"} <= names
    assert "openjet_jax/server/page.html" in names
    tuned = {f"pallas_kernels/tuned_tiles/{p.name}" for p in FOLDER.glob("*.json")}
    assert tuned and tuned <= names
    assert "openjet_jax/tiny/openjet-tiny-code-Q4_K_M.gguf" in names
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"openjet_jax", "pallas_kernels"}


def test_the_wheel_carries_its_licence_and_the_sources_of_the_bundled_model(wheel: pathlib.Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"LICENSE", "NOTICE"} <= {pathlib.PurePosixPath(name).name for name in names}


def test_an_installed_convert_never_shadows_a_convert_of_the_users(
    wheel: pathlib.Path, tmp_path: pathlib.Path
):
    site, work = tmp_path / "site", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(site)
    work.mkdir()
    (work / "convert.py").write_text("mine = True\n")
    code = "import convert, openjet_jax.convert; print(convert.mine, openjet_jax.convert.__file__);"
    done = python(code, work, site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", str(site / "openjet_jax" / "convert" / "__init__.py")]


def test_importing_the_folder_by_its_bare_name_says_the_right_one():
    done = python("import convert", ROOT)
    assert done.returncode == 1
    assert "import openjet_jax.convert, not convert" in done.stderr
