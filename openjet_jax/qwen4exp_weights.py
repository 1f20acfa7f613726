"""The weights of a qwen4exp model; what it shares with others is in `weights.py`."""

import equinox as eqx
from jaxtyping import Array, Float

from openjet_jax.weights import MtpWeights, Packed, PartProjection, Projection, RowTable, Weights


class StreamWeights(eqx.Module):
    """Mixers of the residual streams: a gated mean of them, and what a block adds to each.

    `inject` is None where nothing is added back: before a head.
    """

    norm: Float[Array, "layers width"]
    down: Projection
    up: Projection
    inject: Projection | None


class ExpertWeights(eqx.Module):
    """Mixture of experts. The rows of `gate`, `up` and `down` are those of all experts in order."""

    router: Projection
    gate: Packed
    up: Packed
    down: Packed
    shared_router: Float[Array, "layers hidden"]
    shared_gate: Projection
    shared_up: PartProjection
    shared_down: Projection


class IndexerWeights(eqx.Module):
    """What chooses the blocks that sparse attention reads."""

    q: Projection
    k: Projection
    q_norm: Float[Array, "layers index_width"]
    k_norm: Float[Array, "layers index_width"]


class NgramWeights(eqx.Module):
    """The n-gram table, and how a layer's residual takes the embedding that it gives."""

    table: RowTable
    key: Projection
    value: Projection
    key_norm: Float[Array, " width"]
    query_norm: Float[Array, " width"]
    conv_norm: Float[Array, " width"]
    conv: Float[Array, "width taps"]


class Qwen4ExpMtpWeights(MtpWeights):
    """The MTP block of a qwen4exp model."""

    mixer_streams: StreamWeights
    ffn_streams: StreamWeights
    indexer: IndexerWeights | None
    experts: ExpertWeights
    final: StreamWeights


class Qwen4ExpWeights(Weights):
    """All weights of a qwen4exp model."""

    mixer_streams: StreamWeights
    ffn_streams: StreamWeights
    indexer: IndexerWeights | None
    experts: ExpertWeights
    ngrams: NgramWeights
    final: StreamWeights
    mtp: Qwen4ExpMtpWeights | None
