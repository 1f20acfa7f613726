"""What a qwen4exp GGUF holds: its keys, and a table of tensors for each kind of block."""

from collections.abc import Iterator

from openjet_jax.config import BLOCK_POSITIONS, ModelConfig, Qwen4ExpConfig
from openjet_jax.convert.keys import Keys
from openjet_jax.convert.layer_blocks import Blocks
from openjet_jax.convert.layout import Layout
from openjet_jax.convert.ngram_keys import TABLE, read_ngrams
from openjet_jax.convert.shared_keys import shared_sizes, tensor_sizes
from openjet_jax.convert.tensor_names import (
    DELTANET,
    Entry,
    ExpectedTensor,
    Part,
    expected,
    matrix,
    vector,
)


def _streams(prefix: str, inject: bool = True) -> tuple[Entry, ...]:
    """Returns the tensors of a mixer of the residual streams."""
    entries = (
        _gain(f"{prefix}_norm.weight", "norm"),
        matrix(f"{prefix}_down.weight", "down", "rank", "width"),
        matrix(f"{prefix}_up.weight", "up", "width", "rank"),
    )
    if not inject:
        return entries
    return (*entries, matrix(f"{prefix}_inject.weight", "inject", "streams", "width"))


def _gain(suffix: str, field: str) -> Entry:
    """Returns the entry of a gain of every stream, written as a vector or as a matrix."""
    also = ("streams", "hidden")
    return Entry(suffix=suffix, field=field, axes=("width",), kind="dense", also=also)


def _experts(suffix: str, field: str, rows: str, k: str, part: Part | None = None) -> Entry:
    axes = ("experts", rows, k)
    return Entry(suffix=suffix, field=field, axes=axes, kind="packed", part=part)


def _fused(*before: str) -> Part:
    """Returns the part that gates or ups have in a tensor with rows [gate | up] per expert."""
    axes = ("experts", "expert_gate_up", "hidden")
    return Part(name="ffn_gate_up_exps.weight", axes=axes, before=before)


_GLOBAL = (
    matrix("token_embd.weight", "embedding", "vocab", "hidden"),
    matrix("output.weight", "head", "vocab", "hidden", optional=True),
)
_FINAL = _streams("output_hc", inject=False)
_TABLE = (Entry(suffix=TABLE, field="table", axes=("ngram_rows", "ngram_width"), kind="rows"),)
_NGRAMS = (
    matrix("ple_key.weight", "key", "width", "hidden"),
    matrix("ple_value.weight", "value", "hidden", "hidden"),
    _gain("ple_norm_key.weight", "key_norm"),
    _gain("ple_norm_query.weight", "query_norm"),
    _gain("ple_norm_conv.weight", "conv_norm"),
    Entry(suffix="ple_conv1d.weight", field="conv", axes=("width", "ngram_taps"), kind="dense"),
)
_EXPERTS = (
    matrix("ffn_gate_inp.weight", "router", "experts", "hidden"),
    _experts("ffn_gate_exps.weight", "gate", "expert_ffn", "hidden", _fused()),
    _experts("ffn_up_exps.weight", "up", "expert_ffn", "hidden", _fused("expert_ffn")),
    _experts("ffn_down_exps.weight", "down", "hidden", "expert_ffn"),
    vector("ffn_gate_inp_shexp.weight", "shared_router", "hidden"),
    matrix("ffn_gate_shexp.weight", "shared_gate", "shared_ffn", "hidden"),
    matrix("ffn_up_shexp.weight", "shared_up", "shared_ffn", "hidden"),
    matrix("ffn_down_shexp.weight", "shared_down", "hidden", "shared_ffn"),
)
_ATTENTION = (
    matrix("attn_q.weight", "q", "query_gate", "hidden"),
    matrix("attn_k.weight", "k", "kv", "hidden"),
    matrix("attn_v.weight", "v", "kv", "hidden"),
    matrix("attn_output.weight", "out", "hidden", "attended"),
    vector("attn_q_norm.weight", "q_norm", "head_width"),
    vector("attn_k_norm.weight", "k_norm", "head_width"),
)
_INDEXER = (
    matrix("indexer.q_proj.weight", "q", "index_queries", "hidden"),
    matrix("indexer.k_proj.weight", "k", "index_width", "hidden"),
    vector("indexer.q_norm.weight", "q_norm", "index_width"),
    vector("indexer.k_norm.weight", "k_norm", "index_width"),
)
_MTP = (
    vector("nextn.enorm.weight", "embed_norm", "hidden"),
    _gain("nextn.hnorm.weight", "hidden_norm"),
    matrix("nextn.eh_proj.weight", "join", "hidden", "joined"),
    matrix("nextn.embed_tokens.weight", "embedding", "vocab", "hidden", optional=True),
    matrix("nextn.shared_head_head.weight", "head", "vocab", "hidden", optional=True),
)
_MTP_FINAL = _streams("nextn.hc_head", inject=False)
_MIXER_STREAMS, _FFN_STREAMS = _streams("hc_attn"), _streams("hc_ffn")


def read_config(keys: Keys, blocks: Blocks) -> Qwen4ExpConfig:
    """Returns the configuration that the keys give.

    Raises:
      GGUFError: a key is missing, of the wrong type, or contradicts another.
    """
    sizes = shared_sizes(keys, blocks)
    streams = keys.count("hyper_connection.count")
    if streams < 2:
        raise keys.error("hyper_connection.count", f"={streams} must be at least 2 streams")
    experts, used = keys.count("expert_count"), keys.count("expert_used_count")
    if used > experts:
        raise keys.error("expert_used_count", f"={used} must be at most expert_count={experts}")
    index_width = keys.count("attention.indexer.key_length")
    if sizes["rotary"] > index_width:
        raise keys.error(
            "rope.dimension_count",
            f"={sizes['rotary']} must be at most attention.indexer.key_length={index_width}",
        )
    sparse = _read_sparse(keys, blocks, sizes["recurrent"])
    top_k = keys.count("attention.indexer.top_k")
    if top_k % BLOCK_POSITIONS:
        raise keys.error(
            "attention.indexer.top_k", f"={top_k} must be a multiple of {BLOCK_POSITIONS}"
        )
    return Qwen4ExpConfig(
        streams=streams,
        stream_rank=keys.count("hyper_connection.low_rank"),
        experts=experts,
        experts_used=used,
        expert_ffn=keys.count("expert_feed_forward_length"),
        shared_ffn=keys.count("expert_shared_feed_forward_length"),
        sparse=sparse[: blocks.trunk],
        mtp_sparse=blocks.has_mtp and sparse[blocks.trunk],
        index_heads=keys.count("attention.indexer.head_count"),
        index_width=index_width,
        budget=top_k // BLOCK_POSITIONS,
        **read_ngrams(keys, sizes),
        **sizes,
    )


def _read_sparse(keys: Keys, blocks: Blocks, recurrent: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns which blocks are sparse attention; the ratio of a DeltaNet layer says nothing."""
    name = "attention.compress_ratios"
    ratios = keys.array(name, "iu")
    if ratios is None:
        raise keys.error(name, " is missing")
    if ratios.size != blocks.count:
        raise keys.error(name, f" has {ratios.size} entries; block_count={blocks.count} are needed")
    linear = (*recurrent, *(False for _ in range(blocks.count - blocks.trunk)))
    for block, (ratio, skipped) in enumerate(zip(ratios.tolist(), linear, strict=True)):
        if not skipped and ratio not in (0, BLOCK_POSITIONS):
            raise keys.error(
                name,
                f"[{block}]={ratio} is not supported; only 0 (dense) and {BLOCK_POSITIONS} are",
            )
    return tuple(bool(r) and not skip for r, skip in zip(ratios.tolist(), linear, strict=True))


def expected_tensors(config: ModelConfig) -> tuple[ExpectedTensor, ...]:
    """Returns every tensor of a model, globals first, then block by block, the MTP block last."""
    assert isinstance(config, Qwen4ExpConfig)
    sizes = _sizes(config)
    found = expected("", "global", 0, _GLOBAL, sizes)
    found += expected("", "final", 0, _FINAL, sizes)
    found += expected("", "ngrams", 0, _TABLE, sizes)
    slots = {"deltanet": 0, "attention": 0, "indexer": 0}
    for layer, recurrent in enumerate(config.recurrent):
        tables = [("deltanet", DELTANET)] if recurrent else [("attention", _ATTENTION)]
        if config.sparse[layer]:
            tables.append(("indexer", _INDEXER))
        for kind, entries in tables:
            found += expected(f"blk.{layer}.", kind, slots[kind], entries, sizes)
            slots[kind] += 1
        for stack, entries in _every_layer():
            found += expected(f"blk.{layer}.", stack, layer, entries, sizes)
        if layer == config.ngram_layer:
            found += expected(f"blk.{layer}.", "ngrams", 0, _NGRAMS, sizes)
    if config.has_mtp:
        tables = [("mtp.attention", _ATTENTION), ("mtp", _MTP), ("mtp.final", _MTP_FINAL)]
        if config.mtp_sparse:
            tables.append(("mtp.indexer", _INDEXER))
        tables += [(f"mtp.{stack}", entries) for stack, entries in _every_layer()]
        for stack, entries in tables:
            found += expected(f"blk.{config.num_layers}.", stack, 0, entries, sizes)
    return tuple(found)


def _every_layer() -> Iterator[tuple[str, tuple[Entry, ...]]]:
    yield "mixer_streams", _MIXER_STREAMS
    yield "ffn_streams", _FFN_STREAMS
    yield "experts", _EXPERTS


def _sizes(config: Qwen4ExpConfig) -> dict[str, int]:
    return {
        **tensor_sizes(config),
        "width": config.width,
        "streams": config.streams,
        "rank": config.stream_rank,
        "experts": config.experts,
        "expert_ffn": config.expert_ffn,
        "expert_gate_up": 2 * config.expert_ffn,
        "shared_ffn": config.shared_ffn,
        "index_queries": config.index_heads * config.index_width,
        "index_width": config.index_width,
        "ngram_rows": config.ngram_rows,
        "ngram_width": config.hidden // len(config.ngram_sizes),
        "ngram_taps": config.ngram_taps,
    }


def _disregarded(config: ModelConfig) -> frozenset[str]:
    """Returns the indexers of layers that attend to every position: files keep them."""
    assert isinstance(config, Qwen4ExpConfig)
    dense = [i for i in config.attention_layers if not config.sparse[i]]
    if config.has_mtp and not config.mtp_sparse:
        dense.append(config.num_layers)
    return frozenset(f"blk.{layer}.{entry.suffix}" for layer in dense for entry in _INDEXER)


LAYOUT = Layout(
    architecture=Qwen4ExpConfig.architecture,
    read_config=read_config,
    expected_tensors=expected_tensors,
    trunk_tensor="hc_attn_norm.weight",
    mtp_entries=(*_MIXER_STREAMS, *_FFN_STREAMS, *_EXPERTS, *_ATTENTION, *_MTP, *_MTP_FINAL),
    mtp_key_required=True,
    disregarded_tensors=_disregarded,
)
