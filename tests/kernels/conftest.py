"""What tests of kernels share."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def h200() -> Iterator[Any]:
    """Yields a sharding on an H200 that is not here, to compile for; skips where nothing can."""
    from openjet_jax.described import can_compile, card_of, sharding_on

    if not can_compile():
        pytest.skip("needs JAX's CUDA plugin and ptxas")
    # What is compiled for a card that is not here can be kept, but not be read again.
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield sharding_on(card_of("h200"))
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
