"""Weights of 4-bit codes with a scale and an offset per 32: q4_k and q4_1."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.affine import FloatPair, KQuant
from pallas_kernels.packed import PackedFormat

Q4_K = KQuant(name="q4_k", bits=4, group=32, lanes=32)
"""4.625 bits a weight."""

Q4_1 = FloatPair(name="q4_1", bits=4, lanes=16)
"""5 bits a weight."""


def matmul_q4_reference(
    x: jax.Array, planes: Mapping[str, jax.Array], layout: PackedFormat = Q4_K
) -> jax.Array:
    """Returns float32 `x @ W.T` for x [n, k] and the planes of W [rows, k]."""
    return jnp.matmul(x.astype(jnp.float32), layout.unpack(planes).mT, precision="highest")
