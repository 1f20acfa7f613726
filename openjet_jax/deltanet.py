"""Gated DeltaNet layers from state to state, over the rows of a cycle or a chunk of a prompt."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from openjet_jax.config import ModelConfig
from openjet_jax.layers import deltanet_inputs, deltanet_output
from openjet_jax.state import RecurrentState
from openjet_jax.weights import DeltaNetWeights
from pallas_kernels.delta_rule import delta_rule_chunked, delta_rule_in_order


def put_layer(stack: Array, layer, value: Array) -> Array:
    """Returns a stack over layers with one layer's array replaced."""
    return lax.dynamic_update_index_in_dim(stack, value, layer, 0)


def deltanet[S: RecurrentState](
    h: Float[Array, "rows hidden"],
    layer,
    state: S,
    weights: DeltaNetWeights | None,
    config: ModelConfig,
    num_live: Int[Array, ""],
    *,
    gate: Callable[[Array], Array],
    chunked: bool,
) -> tuple[Float[Array, "rows hidden"], S]:
    """Returns the layer's output rows, and the state with this layer's part advanced.

    Rows pending from the last cycle are folded first, in the order of one-by-one processing. The
    rows of a cycle then run on the folded state and become pending. Those of a chunk are folded
    too: after the last layer, the caller commits 0 rows.

    Args:
      h: the layer's input.
      layer: index among the DeltaNet layers; may be traced.
      state: of all layers.
      weights: of all layers.
      config: the model's sizes.
      num_live: rows that count.
      gate: nonlinearity of the output gate.
      chunked: whether the rows are a chunk, certain to stay, rather than a cycle's.
    """
    assert weights is not None
    old = lax.dynamic_slice_in_dim(state.window[layer], state.start, config.history)
    rows, window = deltanet_inputs(h, old, weights, layer, config)
    delta, pending = state.delta[layer], jax.tree.map(lambda x: x[layer], state.pending)
    if chunked:
        delta, _ = delta_rule_in_order(delta, pending, state.num_pending, pending, jnp.int32(0))
        delta, out = delta_rule_chunked(delta, rows, num_live)
        window = lax.dynamic_slice_in_dim(window, num_live, config.history)
    else:
        delta, out = delta_rule_in_order(delta, pending, state.num_pending, rows, num_live)
        put = jax.tree.map(lambda stack, x: put_layer(stack, layer, x), state.pending, rows)
        state = replace(state, pending=put)
    state = replace(
        state,
        delta=put_layer(state.delta, layer, delta),
        window=lax.dynamic_update_slice(state.window, window[None], (layer, 0, 0)),
    )
    return deltanet_output(out, h, weights, layer, config.eps, gate), state
