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

from pallas_kernels.layout import check_k, check_parts, code_specs, pack_codes, spread, unpack_codes
from pallas_kernels.packed import Parts

BLOCK = 256
"""Weights that share the fp16 pair (d, dmin) in k-quants."""


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

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every plane; k must be a multiple of 256."""
        check_k(self.name, k, BLOCK)
        groups = jax.ShapeDtypeStruct((rows, k // self.group), np.uint8)
        blocks = jax.ShapeDtypeStruct((rows, k // BLOCK), np.float16)
        codes = code_specs(rows, k, self.bits)
        return {**codes, "scales": groups, "mins": groups, "d": blocks, "dmin": blocks}

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes; scales are kept as bytes, a NaN or infinite d included."""
        byte, half = np.dtype(np.uint8), np.dtype(np.float16)
        groups = {"codes": (1, byte), "scales": (self.group, byte), "mins": (self.group, byte)}
        groups |= {"d": (BLOCK, half), "dmin": (BLOCK, half)}
        check_k(self.name, check_parts(self.name, parts, groups), BLOCK)
        kept = {name: parts[name] for name in ("scales", "mins", "d", "dmin")}
        return {**pack_codes(parts["codes"], self.bits, self.lanes), **kept}

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
        groups = jax.ShapeDtypeStruct((rows, k // 32), np.float16)
        return {**code_specs(rows, k, self.bits), "d": groups, "m": groups}

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes; d and m are kept as they are, NaN and infinity included."""
        half = np.dtype(np.float16)
        groups = {"codes": (1, np.dtype(np.uint8)), "d": (32, half), "m": (32, half)}
        check_k(self.name, check_parts(self.name, parts, groups), 32)
        codes = pack_codes(parts["codes"], self.bits, self.lanes)
        return {**codes, "d": parts["d"], "m": parts["m"]}

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k]."""
        d, m = (planes[name].astype(jnp.float32)[..., None] for name in ("d", "m"))
        codes = unpack_codes(planes, self.bits, self.lanes).astype(jnp.float32)
        return (codes.reshape(*d.shape[:-1], 32) * d + m).reshape(codes.shape)
