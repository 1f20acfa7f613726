"""A Gated DeltaNet layer between its projections, over plain arrays.

From the projected rows u, z, a, b of a layer's input:

    q, k, v = split(silu(conv(u)))      causal, depthwise, from a history of taps - 1 rows
    q, k    = unit length per head; q scaled by 1/sqrt(width)
    beta    = sigmoid(b)
    g       = decay * softplus(a + dt_bias)
    y       = rms_norm(delta_rule(q, k, v, g, beta)) * gate(z)

Yang et al., "Gated Delta Networks" (2024), as in Qwen3-Next. All layers' memories are stacks; a
layer reads and replaces its own part.
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule import Rows, delta_rule_chunked, delta_rule_in_order

type Gate = Literal["silu", "sigmoid"]

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is static about a layer.

    Attributes:
      key_heads, value_heads: heads of queries and keys, and of values.
      width: of a head.
      taps: of the convolution.
      eps: added to squares before a root.
      gate: nonlinearity of the output gate.
    """

    key_heads: int
    value_heads: int
    width: int
    taps: int
    eps: float
    gate: Gate

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads=} must be a multiple of {self.key_heads=}")
        if self.gate not in GATES:
            raise ValueError(f"{self.gate=} must be one of {', '.join(GATES)}")

    @property
    def history(self) -> int:
        """Rows that the convolution reads before the first."""
        return self.taps - 1

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return (2 * self.key_heads + self.value_heads) * self.width


class Inputs(eqx.Module):
    """What a layer projects from its input rows.

    Attributes:
      u: queries, keys and values before the convolution.
      z: output gates.
      a, b: decay and write strength before their nonlinearities.
    """

    u: Float[Array, "rows channels"]
    z: Float[Array, "rows values"]
    a: Float[Array, "rows value_heads"]
    b: Float[Array, "rows value_heads"]


class Parameters(eqx.Module):
    """The small weights of all layers."""

    conv: Float[Array, "layers channels taps"]
    dt_bias: Float[Array, "layers value_heads"]
    decay: Float[Array, "layers value_heads"]
    norm: Float[Array, "layers width"]


class Memory(eqx.Module):
    """What all layers remember.

    Attributes:
      delta: states before the pending rows.
      window: rows before the convolution: history, then the rows of the last cycle.
      pending: inputs of the delta rule of the last cycle's rows.
    """

    delta: Float[Array, "layers value_heads width width"]
    window: Float[Array, "layers window_rows channels"]
    pending: Rows


def _put(stack: Array, layer, value: Array) -> Array:
    return lax.dynamic_update_index_in_dim(stack, value, layer, 0)


def l2_norm(x: Float[Array, "*rows width"], eps: float) -> Float[Array, "*rows width"]:
    """Returns `x / sqrt(sum(x^2) + eps)` over the last axis."""
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + eps)


def delta_rule_rows(
    x: Inputs,
    history: Float[Array, "history channels"],
    parameters: Parameters,
    layer,
    sizes: Sizes,
) -> tuple[Rows, Float[Array, "window_rows channels"]]:
    """Returns the delta rule's rows, and the window: history and the rows before the convolution.

    Args:
      x: projected rows.
      history: rows before the first.
      parameters: of all layers.
      layer: which; may be traced.
      sizes: of the layer.
    """
    window = jnp.concatenate([history, x.u])
    taps, num_rows = parameters.conv[layer][None], x.u.shape[0]
    mixed = sum(taps[..., j] * window[j : j + num_rows] for j in range(sizes.taps))
    mixed = jax.nn.silu(mixed)
    keys, width = sizes.key_heads * sizes.width, sizes.width
    q, k, v = (part.reshape(num_rows, -1, width) for part in jnp.split(mixed, [keys, 2 * keys], -1))
    dt_bias = parameters.dt_bias[layer][None]
    rows = Rows(
        q=l2_norm(q, sizes.eps) * jnp.float32(width**-0.5),
        k=l2_norm(k, sizes.eps),
        v=v,
        g=parameters.decay[layer][None] * jax.nn.softplus(x.a + dt_bias),
        beta=jax.nn.sigmoid(x.b),
    )
    return rows, window


def _gated(out, z, parameters: Parameters, layer, sizes: Sizes) -> Array:
    scale = lax.rsqrt(jnp.mean(out * out, -1, keepdims=True) + sizes.eps)
    weight = parameters.norm[layer][None, None]
    gated = out * scale * weight * GATES[sizes.gate](z.reshape(out.shape))
    return gated.reshape(z.shape)


def gdn_decode_reference(
    x: Inputs,
    parameters: Parameters,
    memory: Memory,
    layer: Int[Array, ""],
    start: Int[Array, ""],
    num_pending: Int[Array, ""],
    num_live: Int[Array, ""],
    sizes: Sizes,
) -> tuple[Float[Array, "rows values"], Memory]:
    """Returns a cycle's gated outputs, and the memory with this layer's part advanced.

    Pending rows are folded into the state in the order of one-by-one processing; the rows of the
    cycle run on the folded state, leave it alone, and become pending.

    Args:
      x: the cycle's rows.
      parameters: of all layers.
      memory: of all layers.
      layer: which.
      start: where the history of the first row begins inside the window.
      num_pending: pending rows that were accepted; the others are forgotten.
      num_live: rows that count; outputs of later ones are zero.
      sizes: of the layer.
    """
    old = lax.dynamic_slice_in_dim(memory.window[layer], start, sizes.history)
    rows, window = delta_rule_rows(x, old, parameters, layer, sizes)
    pending = jax.tree.map(lambda stack: stack[layer], memory.pending)
    delta, out = delta_rule_in_order(memory.delta[layer], pending, num_pending, rows, num_live)
    memory = Memory(
        delta=_put(memory.delta, layer, delta),
        window=_put(memory.window, layer, window),
        pending=jax.tree.map(lambda stack, row: _put(stack, layer, row), memory.pending, rows),
    )
    return _gated(out, x.z, parameters, layer, sizes), memory


def gdn_prefill_reference(
    x: Inputs,
    parameters: Parameters,
    memory: Memory,
    layer: Int[Array, ""],
    start: Int[Array, ""],
    num_pending: Int[Array, ""],
    num_live: Int[Array, ""],
    sizes: Sizes,
) -> tuple[Float[Array, "rows values"], Memory]:
    """Returns the gated outputs of a chunk of a prompt, and the memory after it.

    Pending rows are folded first; the chunk's live rows, certain to stay, are folded too, and
    nothing is pending then: the window begins with the history of the next row.

    Args:
      x: the chunk, a multiple of `delta_rule.CHUNK` rows.
      parameters: of all layers.
      memory: of all layers.
      layer: which.
      start: where the history of the first row begins inside the window.
      num_pending: pending rows that were accepted; the others are forgotten.
      num_live: rows that count.
      sizes: of the layer.
    """
    old = lax.dynamic_slice_in_dim(memory.window[layer], start, sizes.history)
    rows, window = delta_rule_rows(x, old, parameters, layer, sizes)
    pending = jax.tree.map(lambda stack: stack[layer], memory.pending)
    nothing = jnp.int32(0)
    delta, _ = delta_rule_in_order(memory.delta[layer], pending, num_pending, pending, nothing)
    delta, out = delta_rule_chunked(delta, rows, num_live)
    history = lax.dynamic_slice_in_dim(window, num_live, sizes.history)
    memory = Memory(
        delta=_put(memory.delta, layer, delta),
        window=lax.dynamic_update_slice(memory.window, history[None], (layer, 0, 0)),
        pending=memory.pending,
    )
    return _gated(out, x.z, parameters, layer, sizes), memory
