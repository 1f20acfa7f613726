"""The trunk: all layers over a few rows (a cycle) or a chunk of a prompt, from state to state.

The layer loop runs over stacked weights, so that compile time does not grow with depth: the layer
pattern is cut into repeating units, and each unit into runs of layers of one kind.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from openjet_jax.config import ModelConfig
from openjet_jax.layers import (
    attention_inputs,
    attention_output,
    deltanet_inputs,
    deltanet_output,
    feed_forward,
    rms_norm,
)
from openjet_jax.state import KVCache, RecurrentState
from openjet_jax.weights import Weights, project
from pallas_kernels.attention import attention_reference
from pallas_kernels.delta_rule import delta_rule_chunked, delta_rule_in_order

type Mixer[C] = Callable[[Array, Array | int, C], tuple[Array, C]]
"""(normalised rows, index among the layers of the kind, state) -> (addition, state)."""


def pattern_period(recurrent: tuple[bool, ...]) -> int:
    """Returns the shortest period of the layer pattern; its length where it never repeats."""
    size = len(recurrent)
    for period in range(1, size):
        if size % period == 0 and recurrent == recurrent[:period] * (size // period):
            return period
    return size


def run_layers(
    x: Float[Array, "rows hidden"],
    weights: Weights,
    config: ModelConfig,
    state: tuple[RecurrentState, KVCache],
    deltanet: Mixer[RecurrentState],
    attention: Mixer[KVCache],
) -> tuple[Float[Array, "rows hidden"], tuple[RecurrentState, KVCache]]:
    """Returns the residual stream after all trunk layers, and the state the mixers left.

    Each layer adds its mixer, then its feed-forward block, each behind an RMS norm.

    Args:
      x: embedded rows.
      weights: packed stacks.
      config: the model.
      state: recurrent state and key-value cache.
      deltanet: mixes rows in a Gated DeltaNet layer.
      attention: mixes rows in a full-attention layer.
    """
    period = pattern_period(config.recurrent)
    unit = config.recurrent[:period]
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(unit)]
    deltanets_per_unit, attentions_per_unit = sum(unit), period - sum(unit)

    def layer_of_kind(kind: bool, layer, index, carry):
        x, recurrent, kv = carry
        if kind:
            assert weights.deltanet is not None
            with jax.named_scope("deltanet"):
                h = rms_norm(x, weights.deltanet.norm[index], config.eps)
                y, recurrent = deltanet(h, index, recurrent)
        else:
            assert weights.attention is not None
            with jax.named_scope("attention"):
                h = rms_norm(x, weights.attention.norm[index], config.eps)
                y, kv = attention(h, index, kv)
        x = x + y
        with jax.named_scope("feed_forward"):
            x = x + feed_forward(x, weights.ffn, layer, config.eps)
        return x, recurrent, kv

    def run_unit(i, carry):
        layer, seen = i * period, {True: i * deltanets_per_unit, False: i * attentions_per_unit}
        for kind, count in runs:
            index = seen[kind]

            def body(j, carry, kind=kind, layer=layer, index=index):
                return layer_of_kind(kind, layer + j, index + j, carry)

            carry = lax.fori_loop(0, count, body, carry)
            layer, seen[kind] = layer + count, index + count
        return carry

    x, recurrent, kv = lax.fori_loop(0, config.num_layers // period, run_unit, (x, *state))
    return x, (recurrent, kv)


def _put(stack, layer, value):
    return lax.dynamic_update_index_in_dim(stack, value, layer, 0)


def trunk_cycle(
    weights: Weights,
    config: ModelConfig,
    tokens: Int[Array, " rows"],
    start: Int[Array, ""],
    num_live: Int[Array, ""],
    recurrent: RecurrentState,
    kv: KVCache,
) -> tuple[Float[Array, "rows hidden"], RecurrentState, KVCache]:
    """Returns normed hidden rows of a cycle, and the state with those rows pending.

    The pending rows of the last cycle are folded first; then every row is processed in order.
    Rows past `num_live` are padding: never attended, never written.

    Args:
      weights: the model.
      config: its sizes.
      tokens: the newest token, then drafts.
      start: position of the newest token.
      num_live: 1 + the number of drafts.
      recurrent: state of the Gated DeltaNet layers.
      kv: trunk cache, valid below `start`.

    Returns:
      Trunk output after the final norm for every row; `recurrent` with the last cycle folded,
      whose `num_pending` and `start` the caller sets once it knows what was accepted; the cache.
    """
    rows = tokens.shape[0]
    live = jnp.arange(rows) < num_live
    positions = jnp.where(live, start + jnp.arange(rows), -1)
    folded, num_folded = recurrent.pending, recurrent.num_pending

    def deltanet(h, i, state: RecurrentState):
        assert weights.deltanet is not None
        old = lax.dynamic_slice_in_dim(state.window[i], state.start, config.history)
        inputs, window = deltanet_inputs(h, old, weights.deltanet, i, config)
        pending = jax.tree.map(lambda x: x[i], folded)
        delta, out = delta_rule_in_order(state.delta[i], pending, num_folded, inputs, num_live)
        state = RecurrentState(
            delta=_put(state.delta, i, delta),
            window=_put(state.window, i, window),
            start=state.start,
            pending=jax.tree.map(lambda s, x: _put(s, i, x), state.pending, inputs),
            num_pending=state.num_pending,
        )
        return deltanet_output(out, h, weights.deltanet, i, config.eps), state

    def attention(h, i, kv: KVCache):
        assert weights.attention is not None
        q, gate, k, v = attention_inputs(h, weights.attention, i, positions, config)
        kv = kv.write(i, start, k, v, live)
        out = attention_reference(q, kv.k[i], kv.v[i], positions, start + num_live)
        return attention_output(out, gate, weights.attention, i), kv

    x = weights.embedding.rows(tokens)
    x, (recurrent, kv) = run_layers(x, weights, config, (recurrent, kv), deltanet, attention)
    return rms_norm(x, weights.final_norm, config.eps), recurrent, kv


def trunk_chunk(
    weights: Weights,
    config: ModelConfig,
    tokens: Int[Array, " rows"],
    start: Int[Array, ""],
    num_live: Int[Array, ""],
    recurrent: RecurrentState,
    kv: KVCache,
) -> tuple[Float[Array, "rows hidden"], RecurrentState, KVCache]:
    """Returns normed hidden rows of a chunk of prompt, and the state after it, nothing pending.

    Rows pending from a cycle are folded first, in the cycle's own order of operations.

    Args:
      weights: the model.
      config: its sizes.
      tokens: a multiple of the delta rule's chunk; from `num_live` on, padding.
      start: position of the first token.
      num_live: how many tokens count.
      recurrent: state of the Gated DeltaNet layers.
      kv: trunk cache, valid below `start`.
    """
    rows = tokens.shape[0]
    live = jnp.arange(rows) < num_live
    positions = jnp.where(live, start + jnp.arange(rows), -1)

    def deltanet(h, i, state: RecurrentState):
        assert weights.deltanet is not None
        old = lax.dynamic_slice_in_dim(state.window[i], state.start, config.history)
        inputs, window = deltanet_inputs(h, old, weights.deltanet, i, config)
        pending = jax.tree.map(lambda x: x[i], state.pending)
        delta, _ = delta_rule_in_order(
            state.delta[i], pending, state.num_pending, pending, jnp.int32(0)
        )
        delta, out = delta_rule_chunked(delta, inputs, num_live)
        history = lax.dynamic_slice_in_dim(window, num_live, config.history)
        state = RecurrentState(
            delta=_put(state.delta, i, delta),
            window=lax.dynamic_update_slice(state.window, history[None], (i, 0, 0)),
            start=state.start,
            pending=state.pending,
            num_pending=state.num_pending,
        )
        return deltanet_output(out, h, weights.deltanet, i, config.eps), state

    def attention(h, i, kv: KVCache):
        assert weights.attention is not None
        q, gate, k, v = attention_inputs(h, weights.attention, i, positions, config)
        kv = kv.write(i, start, k, v, live)
        out = attention_reference(q, kv.k[i], kv.v[i], positions, start + num_live)
        return attention_output(out, gate, weights.attention, i), kv

    x = weights.embedding.rows(tokens)
    x, (recurrent, kv) = run_layers(x, weights, config, (recurrent, kv), deltanet, attention)
    recurrent = RecurrentState(
        delta=recurrent.delta,
        window=recurrent.window,
        start=jnp.int32(0),
        pending=recurrent.pending,
        num_pending=jnp.int32(0),
    )
    return rms_norm(x, weights.final_norm, config.eps), recurrent, kv


def logits(weights: Weights, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Returns full-vocabulary logits of normed hidden rows; padding vocabulary is not masked."""
    return project(hidden, weights.head)
