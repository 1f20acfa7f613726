"""Hashes of n-grams to rows of a table: 64-bit arithmetic in 32-bit words, without x64.

    M_n = (c_0 mu_0) xor ... xor (c_{n-1} mu_{n-1})        row = M_n mod size + offset

c_0 is the token, c_s its predecessor s places back. An end token among the predecessors hides
itself and all before it: its id then stands for each of them. The token itself hides nothing.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

LIMB = 16
"""Bits of a limb: products of two fit a word, and sums of a few of their halves do."""


def predecessors(
    ids: Int[Array, " past_and_rows"], count: int, end: int
) -> list[Int[Array, " rows"]]:
    """Returns c_0 .. c_count of each row: its token and its predecessors, cut at end tokens.

    Args:
      ids: `count` tokens before the rows, then the rows' own.
      count: predecessors of a row.
      end: id of the end token, which also stands for what is before the first token.
    """
    rows = ids.shape[0] - count
    found, cut = [ids[count:]], jnp.zeros(rows, bool)
    for back in range(1, count + 1):
        token = ids[count - back : count - back + rows]
        cut = cut | (token == end)
        found.append(jnp.where(cut, end, token))
    return found


def _product(token: Int[Array, " rows"], multiplier: int) -> list[UInt32[Array, " rows"]]:
    """Returns the four limbs of the product, lowest first, modulo 2**64."""
    token = token.astype(jnp.uint32)
    left = [token & 0xFFFF, token >> LIMB]
    right = [jnp.uint32(multiplier >> LIMB * i & 0xFFFF) for i in range(4)]
    sums = [jnp.zeros(token.shape, jnp.uint32) for _ in range(6)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            part = a * b
            sums[i + j] = sums[i + j] + (part & 0xFFFF)
            sums[i + j + 1] = sums[i + j + 1] + (part >> LIMB)
    limbs, carry = [], jnp.zeros(token.shape, jnp.uint32)
    for total in sums[:4]:
        total = total + carry
        limbs.append(total & 0xFFFF)
        carry = total >> LIMB
    return limbs


def _remainder(
    limbs: list[UInt32[Array, " rows"]], sizes: tuple[int, ...]
) -> Int[Array, "rows sizes"]:
    """Returns the number modulo each size (below 2**31), by long division bit by bit."""
    stacked = jnp.stack(limbs[::-1])
    size = jnp.asarray(sizes, jnp.uint32)[None]

    def bit(i, rest):
        digit = stacked[i // LIMB] >> (LIMB - 1 - i % LIMB).astype(jnp.uint32) & 1
        rest = 2 * rest + digit[:, None]
        return jnp.where(rest >= size, rest - size, rest)

    start = jnp.zeros((limbs[0].shape[0], len(sizes)), jnp.uint32)
    return lax.fori_loop(0, len(limbs) * LIMB, bit, start).astype(jnp.int32)


def ngram_rows(
    ids: Int[Array, " past_and_rows"],
    *,
    multipliers: tuple[int, ...],
    sizes: tuple[int, ...],
    offsets: tuple[int, ...],
    end: int,
) -> Int[Array, "rows hashes"]:
    """Returns the rows of the table that each token's n-grams name, the shortest n-gram first.

    Args:
      ids: the tokens before the rows, one less than there are multipliers, then the rows' own.
      multipliers: mu, odd, so small that no product with an id reaches 2**63.
      sizes: rows of each hash; the hashes of one length follow each other.
      offsets: where each hash begins in the table.
      end: id of the end token.
    """
    context = predecessors(ids, len(multipliers) - 1, end)
    per_length = len(sizes) // (len(multipliers) - 1)
    mixed, rows = _product(context[0], multipliers[0]), []
    for i, (token, multiplier) in enumerate(zip(context[1:], multipliers[1:], strict=True)):
        product = _product(token, multiplier)
        mixed = [a ^ b for a, b in zip(mixed, product, strict=True)]
        rows.append(_remainder(mixed, sizes[i * per_length : (i + 1) * per_length]))
    return jnp.concatenate(rows, -1) + jnp.asarray(offsets, jnp.int32)[None]
