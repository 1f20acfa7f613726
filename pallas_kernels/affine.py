"""Affine layouts, whose values are a scaled code and an offset: the classes; kernels own instances.

Both unpack bit for bit whatever a compiler does with multiplications and additions: every product
below is exact in float32 (an 11-bit fp16 significand times integers of at most 8 and 5 bits), so
the one subtraction or addition rounds once, fused or not.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import (
    Groups,
    check_k,
    check_parts,
    coded_specs,
    pack_coded,
    spread,
    unpack_codes,
)
from pallas_kernels.packed import Parts

BLOCK = 256
"""Weights that share the fp16 pair (d, dmin) in k-quants."""

_BYTE, _HALF = np.dtype(np.uint8), np.dtype(np.float16)
_PAIR_GROUPS: Groups = {"codes": (1, _BYTE), "d": (32, _HALF), "m": (32, _HALF)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KQuant:
    """value = d * scale * code - dmin * min.

    Parts and planes, per row: `codes` (parts: uint8 [k]; planes: packed, with `high` for the bits
    above a nibble), `scales` and `mins` uint8 [k / group], `d` and `dmin` float16 [k / 256].

    Attributes:
      name: as written in checkpoints.
      bits: of a code.
      group: weights that share a scale and a min.
      lanes: bytes of a chunk of a code plane (see layout.py).
    """

    name: str
    bits: int
    group: int
    lanes: int

    def _groups(self) -> Groups:
        groups = {"codes": (1, _BYTE), "scales": (self.group, _BYTE), "mins": (self.group, _BYTE)}
        return groups | {"d": (BLOCK, _HALF), "dmin": (BLOCK, _HALF)}

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every plane; k must be a multiple of 256."""
        check_k(self.name, k, BLOCK)
        return coded_specs(rows, k, self.bits, self._groups())

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes; scales are kept as bytes, a NaN or infinite d included."""
        check_k(self.name, check_parts(self.name, parts, self._groups()), BLOCK)
        return pack_coded(parts, self.bits, self.lanes, self._groups())

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k]."""
        scales, mins = (planes[name].astype(jnp.float32) for name in ("scales", "mins"))
        scales *= spread(planes["d"], scales.shape[-1])
        mins *= spread(planes["dmin"], mins.shape[-1])
        codes = unpack_codes(planes, self.bits, self.lanes).astype(jnp.float32)
        values = codes.reshape(*scales.shape, self.group) * scales[..., None] - mins[..., None]
        return values.reshape(codes.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatPair:
    """value = d * code + m.

    Parts and planes, per row: `codes` (parts: uint8 [k]; planes: packed, with `high` for the bit
    above a nibble), `d` and `m` float16 [k / 32].

    Attributes:
      name: as written in checkpoints.
      bits: of a code.
      lanes: bytes of a chunk of a code plane (see layout.py).
    """

    name: str
    bits: int
    lanes: int

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every plane; k must be a multiple of 32."""
        check_k(self.name, k, 32)
        return coded_specs(rows, k, self.bits, _PAIR_GROUPS)

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes; d and m are kept as they are, NaN and infinity included."""
        check_k(self.name, check_parts(self.name, parts, _PAIR_GROUPS), 32)
        return pack_coded(parts, self.bits, self.lanes, _PAIR_GROUPS)

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k]."""
        d, m = (planes[name].astype(jnp.float32)[..., None] for name in ("d", "m"))
        codes = unpack_codes(planes, self.bits, self.lanes).astype(jnp.float32)
        return (codes.reshape(*d.shape[:-1], 32) * d + m).reshape(codes.shape)
