"""Weights of 8-bit signed codes with a scale per 32: q8_0."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import check_k, check_parts, scale_groups
from pallas_kernels.packed import PackedFormat, Parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class EightBit:
    """value = d * code, 8.5 bits a weight.

    Parts and planes, per row: `codes` int8 [k], `d` float16 [k / 32]. The product is exact in
    float32 (11 + 8 bits).
    """

    name: str

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every plane; k must be a multiple of 32."""
        check_k(self.name, k, 32)
        codes = jax.ShapeDtypeStruct((rows, k), np.int8)
        return {"codes": codes, "d": jax.ShapeDtypeStruct((rows, k // 32), np.float16)}

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes, the parts themselves; a NaN or infinite d is kept as it is."""
        groups = {"codes": (1, np.dtype(np.int8)), "d": (32, np.dtype(np.float16))}
        check_k(self.name, check_parts(self.name, parts, groups), 32)
        return dict(parts)

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k]."""
        return scale_groups(planes["codes"].astype(jnp.float32), planes["d"].astype(jnp.float32))


Q8_0 = EightBit(name="q8_0")


def matmul_q8_reference(
    x: jax.Array, planes: Mapping[str, jax.Array], layout: PackedFormat = Q8_0
) -> jax.Array:
    """Returns float32 `x @ W.T` for x [n, k] and the planes of W [rows, k]."""
    return jnp.matmul(x.astype(jnp.float32), layout.unpack(planes).mT, precision="highest")
