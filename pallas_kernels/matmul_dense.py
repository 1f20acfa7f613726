"""Dense weights: values as they are, in float32, float16 or bfloat16."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import check_k, check_parts
from pallas_kernels.packed import PackedFormat, Parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """Values stored as floats. Plane and part: `values` [rows, k] of the format's dtype."""

    name: str
    dtype: np.dtype

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the plane; any positive k."""
        check_k(self.name, k, 1)
        return {"values": jax.ShapeDtypeStruct((rows, k), self.dtype)}

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the plane: the values themselves, NaN and infinity included."""
        check_k(self.name, check_parts(self.name, parts, {"values": (1, self.dtype)}), 1)
        return {"values": parts["values"]}

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k]; widening is exact."""
        return planes["values"].astype(jnp.float32)


F32 = Dense(name="f32", dtype=np.dtype(np.float32))
F16 = Dense(name="f16", dtype=np.dtype(np.float16))
BF16 = Dense(name="bf16", dtype=np.dtype(jnp.bfloat16))


def matmul_dense_reference(
    x: jax.Array, planes: Mapping[str, jax.Array], layout: PackedFormat = F32
) -> jax.Array:
    """Returns float32 `x @ W.T` for x [n, k] and the planes of W [rows, k]."""
    return jnp.matmul(x.astype(jnp.float32), layout.unpack(planes).mT, precision="highest")
