"""Settings of every test: the CPU unless GPU tests are asked for, strict JAX, a warm cache.

Shapes written in annotations are executed: a call with another shape fails.
"""

import os
import pathlib

import pytest

SHAPED = [
    *(f"openjet_jax.{module}" for module in ("cycle", "draft", "draft_vocabulary", "filters")),
    *(f"openjet_jax.{module}" for module in ("layers", "model", "prefill", "sampling")),
    "pallas_kernels.attention",
    "pallas_kernels.delta_rule",
]
"""Modules whose array annotations are checked at every call; others say shapes of host values."""


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
    # Imported only now: jaxtyping may import JAX, which reads the settings above.
    from jaxtyping import install_import_hook

    install_import_hook(SHAPED, "beartype.beartype")
