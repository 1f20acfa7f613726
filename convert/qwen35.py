"""What a qwen35 GGUF holds: its keys, and a table of tensors for each kind of block."""

import dataclasses

from openjet_jax.config import ModelConfig, Qwen35Config
from openjet_jax.convert.keys import Keys
from openjet_jax.convert.layer_blocks import Blocks
from openjet_jax.convert.layout import Layout
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


def _fused(entry: Entry, *before: str) -> Entry:
    """Returns an entry whose rows may stand in one tensor [q and gate per head | k | v]."""
    part = Part(name="attn_qkv.weight", axes=("fused_qkv", "hidden"), before=before)
    return dataclasses.replace(entry, part=part)


_GLOBAL = (
    matrix("token_embd.weight", "embedding", "vocab", "hidden"),
    vector("output_norm.weight", "final_norm", "hidden"),
    matrix("output.weight", "head", "vocab", "hidden", optional=True),
)
_FFN = (
    vector("post_attention_norm.weight", "norm", "hidden"),
    matrix("ffn_gate.weight", "gate", "ffn", "hidden"),
    matrix("ffn_up.weight", "up", "ffn", "hidden"),
    matrix("ffn_down.weight", "down", "hidden", "ffn"),
)
_ATTENTION = (
    vector("attn_norm.weight", "norm", "hidden"),
    _fused(matrix("attn_q.weight", "q", "query_gate", "hidden")),
    _fused(matrix("attn_k.weight", "k", "kv", "hidden"), "query_gate"),
    _fused(matrix("attn_v.weight", "v", "kv", "hidden"), "query_gate", "kv"),
    matrix("attn_output.weight", "out", "hidden", "attended"),
    vector("attn_q_norm.weight", "q_norm", "head_width"),
    vector("attn_k_norm.weight", "k_norm", "head_width"),
)
_DELTANET = (
    vector("attn_norm.weight", "norm", "hidden"),
    *DELTANET,
)
_MTP = (
    vector("nextn.enorm.weight", "embed_norm", "hidden"),
    vector("nextn.hnorm.weight", "hidden_norm", "hidden"),
    matrix("nextn.eh_proj.weight", "join", "hidden", "joined"),
    vector("nextn.shared_head_norm.weight", "head_norm", "hidden", "output_norm.weight"),
    matrix("nextn.embed_tokens.weight", "embedding", "vocab", "hidden", optional=True),
    matrix("nextn.shared_head_head.weight", "head", "vocab", "hidden", optional=True),
)


def read_config(keys: Keys, blocks: Blocks) -> Qwen35Config:
    """Returns the configuration that the keys give.

    Raises:
      GGUFError: a key is missing, of the wrong type, or contradicts another.
    """
    return Qwen35Config(ffn=keys.count("feed_forward_length"), **shared_sizes(keys, blocks))


def expected_tensors(config: ModelConfig) -> tuple[ExpectedTensor, ...]:
    """Returns every tensor of a model, globals first, then block by block, the MTP block last."""
    assert isinstance(config, Qwen35Config)
    sizes = {**tensor_sizes(config), "ffn": config.ffn}
    found = expected("", "global", 0, _GLOBAL, sizes)
    slots = {"deltanet": 0, "attention": 0}
    for layer, recurrent in enumerate(config.recurrent):
        prefix, kind = f"blk.{layer}.", "deltanet" if recurrent else "attention"
        found += expected(prefix, kind, slots[kind], _DELTANET if recurrent else _ATTENTION, sizes)
        found += expected(prefix, "ffn", layer, _FFN, sizes)
        slots[kind] += 1
    if config.has_mtp:
        prefix = f"blk.{config.num_layers}."
        for stack, entries in (("mtp.attention", _ATTENTION), ("mtp.ffn", _FFN), ("mtp", _MTP)):
            found += expected(prefix, stack, 0, entries, sizes)
    return tuple(found)


LAYOUT = Layout(
    architecture=Qwen35Config.architecture,
    read_config=read_config,
    expected_tensors=expected_tensors,
    trunk_tensor="attn_norm.weight",
    mtp_entries=(*_ATTENTION, *_FFN, *_MTP),
    mtp_norm="nextn.shared_head_norm",
)
