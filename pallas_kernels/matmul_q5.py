"""Weights of 5-bit codes with a scale and an offset per 32: q5_k and q5_1."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.affine import FloatPair, KQuant
from pallas_kernels.packed import PackedFormat

Q5_K = KQuant(name="q5_k", bits=5, group=32, lanes=32)
"""5.625 bits a weight."""

Q5_1 = FloatPair(name="q5_1", bits=5, lanes=4)
"""6 bits a weight. Chunks of 4 bytes: 32 weights, the shortest row, have 4 bytes of high bits."""


def matmul_q5_reference(
    x: jax.Array, planes: Mapping[str, jax.Array], layout: PackedFormat = Q5_K
) -> jax.Array:
    """Returns float32 `x @ W.T` for x [n, k] and the planes of W [rows, k]."""
    return jnp.matmul(x.astype(jnp.float32), layout.unpack(planes).mT, precision="highest")
