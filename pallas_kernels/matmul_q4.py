"""Weights of 4-bit codes with a scale and an offset per 32: q4_k and q4_1."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.affine import BLOCK, FloatPair, KQuant
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


def quantise_q4_k(values: jax.Array) -> dict[str, jax.Array]:
    """Returns the parts of q4_k that are near float32 values [rows, k]; `Q4_K.pack` takes them.

    The one rounding in this package. Each group of 32 gets the scale and min with the least squared
    error of a few candidates: codes from a stretched range, then the best line through them (the
    method of llama.cpp's make_qkx2_quants, unweighted). Codes are rounded again once scales and
    mins have six bits. Relative RMS error: 0.071 on normal values.

    Args:
      values: finite; k is a multiple of 256.
    """
    rows, k = values.shape
    x = values.astype(jnp.float32).reshape(rows, k // Q4_K.group, Q4_K.group)
    low = jnp.minimum(x.min(-1, keepdims=True), 0)
    span = jnp.maximum(x.max(-1, keepdims=True) - low, jnp.finfo(jnp.float32).tiny)

    def try_stretch(i, best):
        codes = jnp.clip(jnp.round((x - low) * (13.8 + 0.2 * i.astype(jnp.float32)) / span), 0, 15)
        scale, least = _line(codes, x)
        error = jnp.square(scale * codes - least - x).sum(-1, keepdims=True)
        better = error < best[2]
        tried = (scale, least, error)
        return tuple(jnp.where(better, a, b) for a, b in zip(tried, best, strict=True))

    start = (span / 15, -low, jnp.full_like(low, jnp.inf))
    scale, least, _ = jax.lax.fori_loop(0, 13, try_stretch, start)
    scales, d = _six_bits(scale)
    mins, dmin = _six_bits(least)
    step = scales * jnp.repeat(d.astype(jnp.float32), scales.shape[1] // d.shape[1], 1)
    offset = mins * jnp.repeat(dmin.astype(jnp.float32), mins.shape[1] // dmin.shape[1], 1)
    step, offset = step[..., None], offset[..., None]
    codes = jnp.where(step > 0, (x + offset) / jnp.where(step > 0, step, 1), 0)
    codes = jnp.clip(jnp.round(codes), 0, 15).reshape(rows, k)
    bytes_ = {"codes": codes, "scales": scales, "mins": mins}
    return {n: a.astype(jnp.uint8) for n, a in bytes_.items()} | {"d": d, "dmin": dmin}


def _line(codes: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the best (scale, least) of x = scale * codes - least, with least from 0."""
    mean_c, mean_x = codes.mean(-1, keepdims=True), x.mean(-1, keepdims=True)
    spread = jnp.square(codes - mean_c).sum(-1, keepdims=True)
    scale = ((codes - mean_c) * (x - mean_x)).sum(-1, keepdims=True) / jnp.maximum(spread, 1e-9)
    least = scale * mean_c - mean_x
    through_zero = (codes * x).sum(-1, keepdims=True) / jnp.maximum(
        jnp.square(codes).sum(-1, keepdims=True), 1e-9
    )
    scale = jnp.where(least < 0, through_zero, scale)
    return jnp.maximum(scale, 0), jnp.maximum(least, 0)


def _six_bits(factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whole numbers 0..63 [rows, groups] and the float16 unit of each block of groups."""
    blocks = factors.reshape(factors.shape[0], -1, BLOCK // Q4_K.group)
    unit = (blocks.max(-1, keepdims=True) / 63).astype(jnp.float16)
    real = unit.astype(jnp.float32)
    whole = jnp.where(real > 0, jnp.round(blocks / jnp.where(real > 0, real, 1)), 0)
    return jnp.clip(whole, 0, 63).reshape(factors.shape[0], -1), unit[..., 0]
