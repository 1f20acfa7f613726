"""Activations as decode products read them: float16, with the sums that go with scales and mins."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.decode_words import WEIGHTS, Block

_RUN = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """Activations as the kernels read them: float16, with the sums that go with scales and mins.

    Row r is divided by scales[r], a power of two that brings its largest magnitude to 16..32, so
    nothing overflows and rounding is 2^-12 of a value down to 2^-15 of the largest.

    Attributes:
      blocks: uint32 [K / 256, words]: for each run of 32, row and quad lane t, the eight float16
        of elements 4t..4t+3 and 16+4t..16+4t+3, elements 2 and 3 of each four divided by 16 (see
        `decode_words`); then fragments of the block's offsets [R / 8, 32 lanes, 2 or 4]; then,
        for blocks with mins, of the sums over runs [R / 8, 32 lanes, 2]. Offsets and sums are
        pairs of float16, high and low parts.
      scales: float32 [R].
      operand: the kind of activations, as `Block.operand` names it.
    """

    blocks: jax.Array
    scales: jax.Array
    operand: str = dataclasses.field(metadata={"static": True})


def operand_words(block: Block, rows: int) -> int:
    """Returns the words of the activations that one block of weights meets."""
    return (1024 + 8 * block.num_offsets + (64 if block.has_mins else 0)) * (rows // 8)


def prepare(x: jax.Array, block: Block) -> Activations:
    """Returns activations [R, K] (R = 8 or 16) as products with this kind of block read them."""
    rows, k = x.shape
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=1))
    scaled = jnp.ldexp(x, 5 - exponent[:, None]).reshape(rows, k // _RUN, 2, 4, 2, 2)
    # Dims: row, run, half s, lane t, e, o; the pairs e = 1 meet codes four bits higher.
    divided = scaled * jnp.array([1, 1 / 16], jnp.float32).reshape(1, 1, 1, 1, 2, 1)
    stored = _round_to_half(divided)
    halves = stored.sum(axis=(3, 5))  # row, run, s, e
    values = stored.astype(jnp.float16).transpose(1, 0, 3, 2, 4, 5)
    values = _words(values.reshape(-1, 2))
    parts = [values.reshape(k // WEIGHTS, -1), _fragments(_offsets(halves, block))]
    if block.has_mins:
        whole = halves * jnp.array([1, 16], jnp.float32).reshape(1, 1, 1, 2)
        parts.append(_fragments(whole.sum(axis=(2, 3)).reshape(rows, -1, 8)))
    return Activations(
        blocks=jnp.concatenate(parts, axis=1),
        scales=jnp.ldexp(jnp.float32(1), exponent - 5),
        operand=block.operand,
    )


def _offsets(halves: jax.Array, block: Block) -> jax.Array:
    """Returns [R, K / 256, 8 or 16]: what scales multiply to take the codes' excess off.

    Args:
      halves: float32 [R, runs, 2, 2]: sums of the stored activations of each half of a run, of
        those that meet plain codes and of those divided by 16.
      block: kind of block.
    """
    plain, divided = block.offset_weights
    sums = plain * halves[..., 0] + divided * halves[..., 1]
    if block.num_offsets == 8:
        sums = sums.sum(axis=2)
    return sums.reshape(halves.shape[0], -1, block.num_offsets)


def _round_to_half(x: jax.Array) -> jax.Array:
    """Returns float32 with the significands of float16.

    Not a conversion there and back, which XLA takes for an excess of precision that it may keep.
    """
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


def _fragments(sums: jax.Array) -> jax.Array:
    """Returns uint32 [blocks, words]: right-hand fragments of sums [R, blocks, 8 or 16].

    Rows of the right-hand matrix are the high parts of 8 sums, then the low parts; of 16 sums,
    there is one matrix of high parts and one of low parts.
    """
    rows, blocks, number = sums.shape
    high = _round_to_half(sums)
    both = (
        jnp.stack([high, sums - high], 2)
        .astype(jnp.float16)
        .reshape(rows // 8, 8, blocks, number // 4, 4, 2)
    )
    # Dims: tile, g, block, eights (high ones first), t, pair; they become lanes' words.
    return _words(both.transpose(2, 0, 1, 4, 3, 5).reshape(-1, 2)).reshape(blocks, -1)


def _words(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint32)
