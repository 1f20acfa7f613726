"""What tests of kernels share."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture
def h200() -> Iterator[Any]:
    """Yields a sharding on an H200 that is not here, to compile for; skips where nothing can.

    JAX cannot read back a program that it has kept for a card that is not here, so none is kept.
    """
    from openjet_jax.described import can_compile, card_of, sharding_on

    if not can_compile():
        pytest.skip("needs JAX's CUDA plugin and ptxas")
    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield sharding_on(card_of("h200"))
    jax.config.update("jax_enable_compilation_cache", kept)
