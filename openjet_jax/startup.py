"""What is decided before JAX starts: which device it uses, and how much of a GPU's memory.

JAX reads these variables of the environment once, so they are set before it is imported. Where it
is imported already, nothing happens: whoever did that has decided.
"""

import os
import sys

MEMORY_FRACTION = 0.92
"""Of a GPU's memory that may be used by default: the driver and CUDA's context need the rest."""

_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def share_memory(fraction: float | None = None) -> None:
    """Has JAX take a GPU's memory as it is needed, up to a share, and not 75 % of it at once.

    Args:
      fraction: the share; by default what the environment says, else `MEMORY_FRACTION`.

    Raises:
      ValueError: the share is not in 0..1.
    """
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction={fraction} must be above 0 and at most 1")
    if "jax" in sys.modules:
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if fraction is not None:
        for name in _FRACTIONS:
            os.environ.pop(name, None)
    if not any(os.environ.get(name) for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = str(fraction or MEMORY_FRACTION)


def use_cpu() -> None:
    """Keeps JAX off every accelerator: no memory is taken there, and no driver has to start."""
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"
