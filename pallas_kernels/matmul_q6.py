"""Weights of 6-bit codes with a signed scale per 16: q6_k."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import (
    check_k,
    check_parts,
    coded_specs,
    pack_coded,
    scale_groups,
    spread,
    unpack_codes,
)
from pallas_kernels.packed import PackedFormat, Parts

_LANES = 16
_GROUPS = {
    "codes": (1, np.dtype(np.uint8)),
    "scales": (16, np.dtype(np.int8)),
    "d": (256, np.dtype(np.float16)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SixBit:
    """value = d * scale * (code - 32), 6.5625 bits a weight.

    Parts, per row: `codes` uint8 [k] below 64, `scales` int8 [k / 16], `d` float16 [k / 256].
    Planes: `codes` (low nibbles) and `high` (two bits), in chunks of 16 bytes; `scales` and `d` as
    they are. Products are exact in float32 (11 + 7 + 5 bits), so any order of them is bit-exact.
    """

    name: str

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every plane; k must be a multiple of 256."""
        check_k(self.name, k, 256)
        return coded_specs(rows, k, 6, _GROUPS)

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes; a NaN or infinite d is kept as it is."""
        check_k(self.name, check_parts(self.name, parts, _GROUPS), 256)
        return pack_coded(parts, 6, _LANES, _GROUPS)

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k]."""
        scales = planes["scales"].astype(jnp.float32)
        codes = unpack_codes(planes, 6, _LANES) - 32
        d = spread(planes["d"], scales.shape[-1])
        return scale_groups(codes.astype(jnp.float32), d * scales)


Q6_K = SixBit(name="q6_k")


def matmul_q6_reference(
    x: jax.Array, planes: Mapping[str, jax.Array], layout: PackedFormat = Q6_K
) -> jax.Array:
    """Returns float32 `x @ W.T` for x [n, k] and the planes of W [rows, k]."""
    return jnp.matmul(x.astype(jnp.float32), layout.unpack(planes).mT, precision="highest")
