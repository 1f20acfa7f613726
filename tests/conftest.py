"""Settings of every test: the CPU unless GPU tests are asked for, strict JAX, a warm cache.

Shapes written in annotations are executed: a call with another shape fails.
"""

import hashlib
import os
import pathlib
import shutil

import pytest

SHAPED = [
    *(f"openjet_jax.{module}" for module in ("cycle", "deltanet", "draft_vocabulary", "experts")),
    "openjet_jax.head_choice",
    *(f"openjet_jax.{module}" for module in ("filters", "layers", "ngrams", "prefill", "qwen35")),
    *(f"openjet_jax.{module}" for module in ("qwen4exp", "sampling", "sparse_attention")),
    "openjet_jax.streams",
    *(f"pallas_kernels.{op}" for op in ("attention", "delta_rule", "expert_tiles", "ngram_hash")),
    *(f"pallas_kernels.{op}" for op in ("pooled_keys", "sparse_attention")),
]
"""Modules whose array annotations are checked at every call; others say shapes of host values."""


def own_cache(root: pathlib.Path) -> pathlib.Path:
    """Returns where these sources keep checkpoints and programs; what others kept is removed."""
    digest = hashlib.sha256()
    for package in ("openjet_jax", "openjet_jax/convert", "pallas_kernels"):
        for path in sorted((root / package).glob("*.py")):
            digest.update(path.read_bytes())
    caches = root / ".pytest_cache" / "openjet"
    own = caches / digest.hexdigest()[:16]
    own.mkdir(parents=True, exist_ok=True)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for other in set(caches.iterdir()) - {own}:
            shutil.rmtree(other, ignore_errors=True)
    return own


def pytest_configure(config: pytest.Config) -> None:
    """Sets JAX up before any test module imports it, for this process and for those it starts."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    os.environ.setdefault("OPENJET_CACHE", str(own_cache(config.rootpath)))
    cache = config.rootpath / ".pytest_cache" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    # Imported only now: jaxtyping may import JAX, which reads the settings above.
    from jaxtyping import install_import_hook

    install_import_hook(SHAPED, "beartype.beartype")
