"""What a packed weight is: named planes of bytes, and the arithmetic that turns them into floats.

A packed format splits a quantised matrix [rows, k] into *planes*, arrays [rows, bytes per row] of
one kind of number each (codes, scales, ...), so that a kernel loads every plane in aligned words.
Each format is declared in the file of the kernel that reads it; `FORMATS` in `formats.py` lists
them by name. Packing never rounds: unpacked values are bit for bit those of the source block.
This file knows no model and no file format.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

type Planes = dict[str, jax.Array]
"""Planes by name; every plane is [..., rows, per row], with the same leading axes."""

type Parts = Mapping[str, np.ndarray]
"""The integers and scales of a quantised matrix before packing; each format documents its own."""


class PackedFormat(Protocol):
    """A packed layout: how it is stored, written and read."""

    @property
    def name(self) -> str:
        """Stable name, as written in checkpoints."""
        ...

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every plane of a [rows, k] matrix.

        Raises:
          ValueError: k is not a multiple of the format's group.
        """
        ...

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes of one matrix (NumPy, at conversion time)."""
        ...

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k] of planes with any leading axes (JAX)."""
        ...
