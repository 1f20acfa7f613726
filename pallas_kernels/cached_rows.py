"""Rows of a key-value cache: floats, or q8_0, 8.5 bits a value.

q8_0 keeps 32 neighbouring values of a row as integers from -127 to 127 and their scale. The scale
is the largest magnitude / 127 in bfloat16, which has float32's range where float16 would lose rows
that are large or tiny; integers are rounded for the scale as it is stored, so no value is off by
more than half a scale. A row's bits depend on that row alone.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int8

GROUP = 32
"""Neighbouring values that share a scale."""

Q8_0 = "q8_0"

_LARGEST = 127


class Q8Rows(eqx.Module):
    """Rows in q8_0.

    Attributes:
      codes: integers.
      scales: of every `GROUP` codes.
    """

    codes: Int8[Array, "*places width"]
    scales: BFloat16[Array, "*places groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.codes.shape

    def __getitem__(self, index) -> "Q8Rows":
        """Returns some rows; the index names places alone."""
        return Q8Rows(codes=self.codes[index], scales=self.scales[index])


CachedRows = Float[Array, "..."] | Q8Rows


def quantized(x: Float[Array, "*places width"]) -> Q8Rows:
    """Returns rows in q8_0.

    Raises:
      ValueError: the width is not a whole number of groups.
    """
    *places, width = x.shape
    groups = x.astype(jnp.float32).reshape(*places, _groups(width), GROUP)
    # A plain cast to bfloat16 and back would be taken out by XLA.
    scales = lax.reduce_precision(jnp.max(jnp.abs(groups), -1) / _LARGEST, 8, 7)
    codes = jnp.round(groups / jnp.where(scales == 0, 1.0, scales)[..., None])
    codes = jnp.clip(codes, -_LARGEST, _LARGEST).astype(jnp.int8)
    return Q8Rows(codes=codes.reshape(x.shape), scales=scales.astype(jnp.bfloat16))


def values(rows: CachedRows) -> Float[Array, "..."]:
    """Returns rows in float32."""
    if not isinstance(rows, Q8Rows):
        return rows.astype(jnp.float32)
    groups = rows.codes.astype(jnp.float32).reshape(*rows.scales.shape, GROUP)
    return (groups * rows.scales.astype(jnp.float32)[..., None]).reshape(rows.shape)


def like(cache: CachedRows, rows: Float[Array, "*rows width"]) -> CachedRows:
    """Returns rows in the format of a cache."""
    return quantized(rows) if isinstance(cache, Q8Rows) else rows.astype(cache.dtype)


def empty(shape: tuple[int, ...], kind: str) -> CachedRows:
    """Returns rows of zeros.

    Args:
      shape: of the values.
      kind: `Q8_0`, or a float type's name.

    Raises:
      ValueError: the width is not a whole number of groups.
    """
    if kind != Q8_0:
        return jnp.zeros(shape, jnp.dtype(kind))
    *places, width = shape
    scales = jnp.zeros((*places, _groups(width)), jnp.bfloat16)
    return Q8Rows(codes=jnp.zeros(shape, jnp.int8), scales=scales)


def _groups(width: int) -> int:
    if width % GROUP:
        raise ValueError(f"{width=} of a row must be a multiple of {GROUP=} for {Q8_0}")
    return width // GROUP


def block_of(rows: CachedRows, start, size: int) -> Float[Array, "..."]:
    """Returns `size` consecutive places from `start` on, in float32."""
    return values(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), rows))
