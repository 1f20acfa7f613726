"""Weights of 4-bit codes that index a table fixed by the format, with no offset."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """value = d * scale * unit * values[code], without the scale where the format has none.

    Parts and planes, per row: `codes` (parts: uint8 [k] below 16; plane: nibbles in chunks of 16
    bytes), `scales` int8 [k / group] if the format has them, `d` [k / block]. d * scale is exact in
    float32 (11 + 7 bits), so a value is rounded once at most, and not at all with six-bit scales.

    Attributes:
      name: as written in checkpoints.
      values: what the 16 codes stand for, in units of `unit`.
      unit: a power of two.
      group: weights that share a scale; None for a format without scales.
      block: weights that share d.
      dtype: of d.
    """

    name: str
    values: tuple[int, ...]
    unit: float = 1.0
    group: int | None = None
    block: int = 32
    dtype: np.dtype = np.dtype(np.float16)

    def __post_init__(self):
        """Checks the table."""
        if len(self.values) != 16:
            raise ValueError(f"a table has 16 values, not {len(self.values)}")

    def _groups(self) -> dict[str, tuple[int, np.dtype]]:
        scales = {} if self.group is None else {"scales": (self.group, np.dtype(np.int8))}
        return {"codes": (1, np.dtype(np.uint8)), **scales, "d": (self.block, self.dtype)}

    def plane_specs(self, rows: int, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every plane; k must be a multiple of 32 and of `block`."""
        check_k(self.name, k, max(self.block, 2 * _LANES))
        return coded_specs(rows, k, 4, self._groups())

    def pack(self, parts: Parts) -> dict[str, np.ndarray]:
        """Returns the planes; a NaN or infinite d is kept as it is."""
        k = check_parts(self.name, parts, self._groups())
        check_k(self.name, k, max(self.block, 2 * _LANES))
        return pack_coded(parts, 4, _LANES, self._groups())

    def unpack(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the float32 values [..., rows, k]."""
        scales = planes["d"].astype(jnp.float32)
        if self.group is not None:
            groups = planes["scales"].astype(jnp.float32)
            scales = spread(scales, groups.shape[-1]) * groups
        return scale_groups(self._look_up(unpack_codes(planes, 4, _LANES)), scales)

    def _look_up(self, codes: jax.Array) -> jax.Array:
        """Returns unit * values[codes] as float32: arithmetic for a ramp, else four selections."""
        first, step = self.values[0], self.values[1] - self.values[0]
        if self.values == tuple(first + step * i for i in range(16)):
            return (codes * step + first).astype(jnp.float32) * self.unit
        # Halving the table bit by bit vectorises on every backend; a gather does not.
        level = [jnp.float32(value * self.unit) for value in self.values]
        for bit in range(4):
            odd = (codes & (1 << bit)) != 0
            level = [jnp.where(odd, b, a) for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]


def _symmetric(*magnitudes: int) -> tuple[int, ...]:
    """Returns the table in which code 8 + i is magnitude i and code 7 - i its negative."""
    half = magnitudes + (0,) * (8 - len(magnitudes))
    return tuple(-m for m in reversed(half)) + half


_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

Q4_0 = Table(name="q4_0", values=tuple(range(-8, 8)))
Q3_K = Table(name="q3_k", values=tuple(range(-8, 8)), group=16, block=256)
IQ4_NL = Table(name="iq4_nl", values=_NONLINEAR)
IQ4_XS = Table(name="iq4_xs", values=_NONLINEAR, group=32, block=256)
IQ3_S = Table(name="iq3_s", values=_symmetric(*range(1, 16, 2)), group=32, block=256)
IQ3_XXS = Table(
    name="iq3_xxs",
    values=_symmetric(2, 6, 10, 14, 18, 22, 26, 31),
    unit=1 / 2,
    group=32,
    block=256,
)
IQ2 = Table(name="iq2", values=_symmetric(8, 25, 43), unit=1 / 8, group=16, block=256)
IQ1 = Table(name="iq1", values=_symmetric(1, 7, 9), unit=1 / 8, group=16, block=256)
MXFP4 = Table(name="mxfp4", values=_E2M1, dtype=np.dtype(jnp.bfloat16))
NVFP4 = Table(name="nvfp4", values=_E2M1, block=16)


def matmul_t4_reference(
    x: jax.Array, planes: Mapping[str, jax.Array], layout: PackedFormat = Q4_0
) -> jax.Array:
    """Returns float32 `x @ W.T` for x [n, k] and the planes of W [rows, k]."""
    return jnp.matmul(x.astype(jnp.float32), layout.unpack(planes).mT, precision="highest")
