"""Mixture of experts: the best few of many for each row, and one that every row takes."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.config import Qwen4ExpConfig
from openjet_jax.projections import gated, project
from openjet_jax.qwen4exp_weights import ExpertWeights
from pallas_kernels.expert_tiles import expert_tiles


def route(
    x: Float[Array, "rows hidden"], weights: ExpertWeights, layer, config: Qwen4ExpConfig
) -> tuple[Int[Array, "rows used"], Float[Array, "rows used"]]:
    """Returns each row's experts, best first and the lower id among equals, and their weights.

    The weights are the experts' softmax probabilities, made to sum to 1.
    """
    probabilities = jax.nn.softmax(project(x, weights.router, layer), -1)
    best, chosen = lax.top_k(probabilities, config.experts_used)
    return chosen, best / jnp.sum(best, -1, keepdims=True)


def experts(
    x: Float[Array, "rows hidden"],
    live: Bool[Array, " rows"],
    weights: ExpertWeights,
    layer,
    config: Qwen4ExpConfig,
) -> Float[Array, "rows hidden"]:
    """Returns `sum_e w_e swiglu_e(x) + sigmoid(<s, x>) swiglu_shared(x)`.

    A row's experts are added in order of id, whatever the other rows are.

    Args:
      x: the block's input.
      live: rows that count; routed experts give the others zeros.
      weights: of all layers.
      layer: index among them; may be traced.
      config: the model's sizes.
    """
    chosen, shares = route(x, weights, layer, config)
    tiles, shares = expert_tiles(chosen, live, config.experts), shares.reshape(-1)

    def add_tile(i, total):
        expert, pairs, counted = tiles.tile(i)
        rows = pairs // config.experts_used
        inner, outer = (expert, config.expert_ffn), (expert, config.hidden)
        h = x[rows]
        gate = jax.nn.silu(_apply(h, weights.gate.dense(layer, inner)))
        out = _apply(
            gate * _apply(h, weights.up.dense(layer, inner)), weights.down.dense(layer, outer)
        )
        rows = jnp.where(counted, rows, x.shape[0])
        return total.at[rows].add(out * shares[pairs][:, None], mode="drop")

    routed = lax.fori_loop(0, tiles.num_tiles, add_tile, jnp.zeros_like(x))
    open_ = jax.nn.sigmoid(jnp.sum(x * weights.shared_router[layer][None], -1, keepdims=True))
    h = gated(x, weights.shared_gate, weights.shared_up, layer)
    return routed + open_ * project(h, weights.shared_down, layer)


def _apply(x: Float[Array, "rows k"], matrix: Float[Array, "n k"]) -> Float[Array, "rows n"]:
    return jnp.matmul(x, matrix.T, precision="highest")
