"""The gated delta rule: one step, a few rows in order (decode), and many rows in chunks (prefill).

Per value head, with state S [key axis, value axis] in float32 and rows (q, k, v, g, beta):

    S <- exp(g) S            decay
    d  = beta (v - S^T k)    correction, read with the decayed state
    S <- S + k d^T           write
    o  = S^T q               output, from the updated state

Yang et al., "Gated Delta Networks" (2024). q already carries 1/sqrt(width). Value head p reads key
head p % key_heads. A row with beta = g = 0 and finite inputs leaves S as it is, to the bit.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

CHUNK = 64
"""Rows of one chunk, a power of two."""

HIGHEST = lax.Precision.HIGHEST


class Rows(eqx.Module):
    """Inputs of the delta rule for consecutive positions, after convolution and normalisation.

    Attributes:
      q, k: queries and keys, of unit length; q scaled by 1/sqrt(width).
      v: values.
      g: logarithm of the decay, at most 0.
      beta: write strength in (0, 1).
    """

    q: Float[Array, "*layers rows key_heads width"]
    k: Float[Array, "*layers rows key_heads width"]
    v: Float[Array, "*layers rows value_heads width"]
    g: Float[Array, "*layers rows value_heads"]
    beta: Float[Array, "*layers rows value_heads"]


def _spread(x: Float[Array, "... key_heads width"], value_heads: int) -> Array:
    """Returns each value head's query or key: head p takes key head p % key_heads."""
    return jnp.tile(x, (1,) * (x.ndim - 2) + (value_heads // x.shape[-2], 1))


def _step(state: Float[Array, "heads width width"], rows: Rows, i) -> tuple[Array, Array]:
    """Returns the state after row i and its output [heads, width].

    The barriers make the step one unit of compilation, so that it rounds alike in every program.
    """
    heads = state.shape[0]
    row = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), rows)
    state, row = lax.optimization_barrier((state, row))
    q, k = _spread(row.q, heads), _spread(row.k, heads)
    state = jnp.exp(row.g)[:, None, None] * state
    read = jnp.sum(state * k[:, :, None], axis=1)
    correction = row.beta[:, None] * (row.v - read)
    state = state + k[:, :, None] * correction[:, None, :]
    out = jnp.sum(state * q[:, :, None], axis=1)
    return lax.optimization_barrier((state, out))


def delta_rule_in_order(
    state: Float[Array, "heads width width"],
    pending: Rows,
    num_pending: Int[Array, ""],
    live: Rows,
    num_live: Int[Array, ""],
) -> tuple[Float[Array, "heads width width"], Float[Array, "rows heads width"]]:
    """Returns the state after the pending rows, and the outputs of the live rows that follow.

    Both runs go through one compiled loop, so a row has the same bits whether it is live (and may
    still be rejected) or pending (accepted, folded one cycle later): committed states equal those
    of one-by-one processing exactly.

    Args:
      state: state before the pending rows.
      pending: accepted rows that are not in `state` yet.
      num_pending: how many of them count.
      live: rows of this cycle; they leave the returned state alone.
      num_live: how many of them count; outputs of later rows are zero.
    """
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), pending, live)
    num_rows = live.g.shape[0]

    def run(state, phase):
        rows, count = phase

        def body(i, carry):
            state, outs = carry
            state, out = _step(state, rows, i)
            return state, lax.dynamic_update_index_in_dim(outs, out, i, 0)

        outs = jnp.zeros((num_rows, *state.shape[:2]), jnp.float32)
        state, outs = lax.fori_loop(0, count, body, (state, outs))
        return state, (state, outs)

    counts = jnp.stack([num_pending, num_live])
    _, (states, outs) = lax.scan(run, state, (both, counts))
    return states[0], outs[1]


def unit_lower_inverse(a: Float[Array, "... 64 64"]) -> Float[Array, "... 64 64"]:
    """Returns (I + A)^-1 for strictly lower triangular A of size `CHUNK`.

    Diagonal blocks of 1, 2, 4, ... rows are inverted, two of one size making one of the next:
    [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]]. The series I - A + A^2 - ... would be
    shorter and is useless: where keys repeat, its terms reach 1e17 and cancel.
    """
    row = jnp.arange(CHUNK)
    inverse = jnp.broadcast_to(jnp.eye(CHUNK, dtype=a.dtype), a.shape)
    for level in range(CHUNK.bit_length() - 1):
        block, pair = row >> level, row >> level + 1
        joins = (pair[:, None] == pair[None]) & (block[:, None] != block[None])
        between = jnp.where(jnp.broadcast_to(joins, a.shape), a, 0.0)
        between = jnp.matmul(between, inverse, precision=HIGHEST)
        inverse = inverse - jnp.matmul(inverse, between, precision=HIGHEST)
    return inverse


def delta_rule_chunked(
    state: Float[Array, "heads width width"], rows: Rows, num_rows: Int[Array, ""]
) -> tuple[Float[Array, "heads width width"], Float[Array, "rows heads width"]]:
    """Returns the state after `num_rows` rows and the outputs, by chunks of `CHUNK` rows.

    The WY form: within a chunk, U and W come from one triangular inverse, independent of the
    state; a scan over chunks then carries the state. Every exponent is at most 0. Not bit-equal
    to the one-by-one order (about 1e-6 relative).

    Args:
      state: state before the first row.
      rows: a multiple of `CHUNK` rows.
      num_rows: rows from here on are padding and change nothing.
    """
    total, heads, width = rows.v.shape
    if total % CHUNK:
        raise ValueError(f"{total=} rows must be a multiple of {CHUNK=}; pad the rows")
    live = jnp.arange(total) < num_rows
    rows = jax.tree.map(lambda x: jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0), rows)

    def chunked(x):
        return jnp.moveaxis(x.reshape(total // CHUNK, CHUNK, *x.shape[1:]), 2, 1)

    q, k = chunked(_spread(rows.q, heads)), chunked(_spread(rows.k, heads))
    v, beta = chunked(rows.v), chunked(rows.beta)
    log_decay = jnp.cumsum(chunked(rows.g), axis=-1)
    exponent = log_decay[..., :, None] - log_decay[..., None, :]
    lower = jnp.tril(jnp.ones(exponent.shape, bool))
    decay = jnp.where(lower, jnp.exp(jnp.where(lower, exponent, 0.0)), 0.0)
    keys = jnp.einsum("nhid,nhjd->nhij", k, k, precision=HIGHEST)
    a = jnp.where(jnp.tril(lower, -1), beta[..., None] * keys * decay, 0.0)
    inverse = unit_lower_inverse(a)
    grown = jnp.exp(log_decay)[..., None]
    u = jnp.matmul(inverse, beta[..., None] * v, precision=HIGHEST)
    w = jnp.matmul(inverse, beta[..., None] * grown * k, precision=HIGHEST)
    scores = jnp.einsum("nhid,nhjd->nhij", q, k, precision=HIGHEST) * decay
    last = log_decay[..., -1:]
    tail = jnp.exp(last - log_decay)[..., None] * k

    def body(state, chunk):
        u, w, q_grown, scores, tail, end = chunk
        corrections = u - jnp.matmul(w, state, precision=HIGHEST)
        out = jnp.matmul(q_grown, state, precision=HIGHEST)
        out = out + jnp.matmul(scores, corrections, precision=HIGHEST)
        state = jnp.exp(end)[..., None] * state
        state = state + jnp.einsum("hid,hie->hde", tail, corrections, precision=HIGHEST)
        return state, out

    state, outs = lax.scan(body, state, (u, w, grown * q, scores, tail, last))
    return state, jnp.moveaxis(outs, 1, 2).reshape(total, heads, width)
