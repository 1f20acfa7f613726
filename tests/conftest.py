"""Settings of every test: the CPU unless GPU tests are asked for, strict JAX, a warm cache."""

import os
import pathlib

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Sets JAX up before any test module imports it, for this process and for those it starts."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    cache = pathlib.Path(config.rootpath, ".pytest_cache")
    os.environ.setdefault("OPENJET_CACHE", str(cache / "openjet"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
