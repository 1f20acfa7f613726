"""What tests of kernels share."""

from typing import Any

import pytest


@pytest.fixture
def h200() -> Any:
    """Returns a sharding on an H200 that is not here, to compile for; skips where nothing can."""
    from openjet_jax.described import can_compile, card_of, sharding_on

    if not can_compile():
        pytest.skip("needs JAX's CUDA plugin and ptxas")
    return sharding_on(card_of("h200"))
