"""Weights of 2-bit codes with a scale and an offset per 16: q2_k."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.affine import KQuant
from pallas_kernels.packed import PackedFormat

Q2_K = KQuant(name="q2_k", bits=2, group=16, lanes=16)
"""3.125 bits a weight."""


def matmul_q2_reference(
    x: jax.Array, planes: Mapping[str, jax.Array], layout: PackedFormat = Q2_K
) -> jax.Array:
    """Returns float32 `x @ W.T` for x [n, k] and the planes of W [rows, k]."""
    return jnp.matmul(x.astype(jnp.float32), layout.unpack(planes).mT, precision="highest")
