"""Gated DeltaNet layers from state to state, over the rows of a cycle or a chunk of a prompt."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openjet_jax.config import ModelConfig
from openjet_jax.projections import LayerInput, project, project_parts
from openjet_jax.state import RecurrentState
from openjet_jax.weights import DeltaNetWeights
from pallas_kernels.deltanet_layer import (
    Gate,
    Inputs,
    Memory,
    Parameters,
    Sizes,
    gdn_decode_reference,
    gdn_prefill_reference,
)


def layer_sizes(config: ModelConfig, gate: Gate) -> Sizes:
    """Returns the sizes of a model's DeltaNet layers."""
    return Sizes(
        key_heads=config.key_heads,
        value_heads=config.value_heads,
        width=config.gdn_width,
        taps=config.conv_taps,
        eps=config.eps,
        gate=gate,
    )


def deltanet[S: RecurrentState](
    h: Float[Array, "rows hidden"] | LayerInput,
    layer,
    state: S,
    weights: DeltaNetWeights | None,
    config: ModelConfig,
    num_live: Int[Array, ""],
    *,
    gate: Gate,
    chunked: bool,
) -> tuple[Float[Array, "rows hidden"], S]:
    """Returns the layer's output rows, and the state with this layer's part advanced.

    Rows pending from the last cycle are folded first: to the bits of one-by-one processing before a
    cycle, and, where kernels run, to rounding before a chunk. The rows of a cycle then run on the
    folded state and become pending. Those of a chunk are folded too: after the last layer, the
    caller commits 0 rows.

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
    sizes = layer_sizes(config, gate)
    parts = project_parts(h, weights.readers, layer)
    parameters = Parameters(
        conv=weights.conv, dt_bias=weights.dt_bias, decay=weights.decay, norm=weights.gate_norm
    )
    memory = Memory(delta=state.delta, window=state.window, pending=state.pending)
    counts = state.start, state.num_pending, num_live
    run = (_prefill_kernel if chunked else _decode_kernel)(weights, sizes)
    if run is not None:
        u, z, a, b = parts
        x, first = Inputs(*(part.rows for part in parts)), (u.first, z.first, a.first, b.first)
        at = jnp.asarray(layer, jnp.int32)
        out, memory = run(x, parameters, memory, at, *counts, sizes, first=first)
    else:
        run = gdn_prefill_reference if chunked else gdn_decode_reference
        x = Inputs(*(part.columns for part in parts))
        out, memory = run(x, parameters, memory, layer, *counts, sizes)
    state = replace(state, delta=memory.delta, window=memory.window, pending=memory.pending)
    return project(out, weights.out, layer), state


def _decode_kernel(weights: DeltaNetWeights, sizes: Sizes):
    if weights.kernels:
        # Mosaic takes a second to import, and only an sm_90 GPU needs it.
        from pallas_kernels.deltanet_decode import fits, gdn_decode

        if fits(sizes):
            return gdn_decode
    return None


def _prefill_kernel(weights: DeltaNetWeights, sizes: Sizes):
    if weights.kernels:
        from pallas_kernels.deltanet_prefill import fits, gdn_prefill

        if fits(sizes):
            return gdn_prefill
    return None
