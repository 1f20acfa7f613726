"""Keys and sizes that every architecture here has.

A default of the format that would be wrong for these models (head width, rotated dimensions, theta)
is not applied: the key is required.
"""

import math
from typing import Any

import numpy as np

from openjet_jax.config import ModelConfig
from openjet_jax.convert.gguf import GGUFError, GGUFFile, quoted
from openjet_jax.convert.keys import Keys
from openjet_jax.convert.layer_blocks import Blocks

DEFAULT_INTERVAL = 4
"""Every how many layers one is attention, where no key says."""

LEAST_EPS = 1e-30
"""Smallest epsilon of the norms that float32 keeps apart from 0, with room."""

UNUSED_TOKEN = 5
"""Token type of vocabulary rows that no text produces."""


def tensor_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the length of every axis that tables of tensors name in common."""
    attended, kv = config.heads * config.head_width, config.kv_heads * config.head_width
    return {
        "vocab": config.vocab,
        "hidden": config.hidden,
        "query_gate": 2 * attended,
        "attended": attended,
        "kv": kv,
        "fused_qkv": 2 * (attended + kv),
        "head_width": config.head_width,
        "channels": config.conv_channels,
        "values": config.value_heads * config.gdn_width,
        "value_heads": config.value_heads,
        "gdn_width": config.gdn_width,
        "taps": config.conv_taps,
        "joined": 2 * config.hidden,
    }


def shared_sizes(keys: Keys, blocks: Blocks) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`.

    Raises:
      GGUFError: a key is missing, of the wrong type, or contradicts another.
    """
    head_width = keys.count("attention.key_length")
    value_width = keys.count("attention.value_length", default=head_width)
    if value_width != head_width:
        raise keys.error("attention.value_length", f"={value_width} must equal {head_width=}")
    heads = keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        raise keys.error("attention.head_count_kv", f"={kv_heads} must divide head_count={heads}")
    key_heads, value_heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    if value_heads % key_heads:
        raise keys.error(
            "ssm.time_step_rank", f"={value_heads} must be a multiple of group_count={key_heads}"
        )
    gdn_width, inner = keys.count("ssm.state_size"), keys.count("ssm.inner_size")
    if inner != value_heads * gdn_width:
        raise keys.error(
            "ssm.inner_size",
            f"={inner} must be time_step_rank x state_size = {value_heads} x {gdn_width}",
        )
    eps = keys.number("attention.layer_norm_rms_epsilon")
    if not LEAST_EPS <= eps <= 1:
        raise keys.error("attention.layer_norm_rms_epsilon", f"={eps} must be in {LEAST_EPS}..1")
    scale = keys.number("attention.scale") if keys.get("attention.scale") is not None else 0.0
    if scale and not math.isclose(scale, head_width**-0.5, rel_tol=1e-6):
        raise keys.error(
            "attention.scale", f"={scale} is not supported; only 1/sqrt({head_width}) is"
        )
    vocab = _read_vocab(keys)
    return dict(
        num_layers=blocks.trunk,
        hidden=keys.count("embedding_length"),
        vocab=vocab,
        vocab_used=_read_vocab_used(keys.file, vocab),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        rotary=_read_rotary(keys, head_width),
        rope_theta=_read_theta(keys),
        key_heads=key_heads,
        value_heads=value_heads,
        gdn_width=gdn_width,
        conv_taps=keys.count("ssm.conv_kernel", least=2),
        eps=eps,
        recurrent=_read_recurrent(keys, blocks),
        has_mtp=blocks.has_mtp,
        context=keys.count("context_length"),
    )


def _read_theta(keys: Keys) -> float:
    theta = keys.number("rope.freq_base")
    if theta < 1:
        raise keys.error("rope.freq_base", f"={theta} must be at least 1")
    return theta


def _read_rotary(keys: Keys, head_width: int) -> int:
    """Returns the rotated dimensions, sure that text positions turn every pair of them.

    Pair i turns by the position on one axis: time, height or width as i mod 3 is 0, 1 or 2 where
    i < 3 sections[i mod 3], else the extra axis. Text has its position on the first three and 0 on
    the extra one, so plain rotation is right only if no pair falls to the extra axis.
    """
    rotary = keys.count("rope.dimension_count")
    if rotary % 2 or rotary > head_width:
        raise keys.error(
            "rope.dimension_count", f"={rotary} must be even and at most {head_width=}"
        )
    sections = keys.array("rope.dimension_sections", "iu")
    if sections is None:
        raise keys.error("rope.dimension_sections", " is missing")
    if not 3 <= sections.size <= 4 or (sections < 0).any():
        raise keys.error(
            "rope.dimension_sections",
            f" has {sections.size} entries, the least {sections.min(initial=0)};"
            " it must be 3 or 4 counts",
        )
    first_bare = min(3 * int(n) + axis for axis, n in enumerate(sections[:3]))
    if first_bare < rotary // 2:
        raise keys.error(
            "rope.dimension_sections",
            f"={sections.tolist()} leaves pair {first_bare} of {rotary // 2} without a text"
            " position, which is not supported",
        )
    return rotary


def _read_recurrent(keys: Keys, blocks: Blocks) -> tuple[bool, ...]:
    """Returns which trunk layers are Gated DeltaNet; a list of layers overrides the interval."""
    interval = keys.count("full_attention_interval", default=DEFAULT_INTERVAL)
    listed = keys.array("attention.recurrent_layers", "biu")
    if listed is None:
        return tuple((i + 1) % interval != 0 for i in range(blocks.trunk))
    if listed.size != blocks.count:
        raise keys.error(
            "attention.recurrent_layers",
            f" has {listed.size} entries; block_count={blocks.count} are needed",
        )
    return tuple(bool(entry) for entry in listed[: blocks.trunk])


def _read_vocab(keys: Keys) -> int:
    """Returns the rows of the embedding; the token list and `vocab_size` must agree with it."""
    file = keys.file
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GGUFError(f"{file.path}: missing tensor 'token_embd.weight'")
    vocab = embedding.rows
    if (declared := keys.count("vocab_size", default=vocab)) != vocab:
        raise keys.error("vocab_size", f"={declared}, but token_embd.weight has {vocab} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return vocab
    if not isinstance(tokens, list):
        raise GGUFError(f"{file.path}: tokenizer.ggml.tokens has the wrong type: not strings")
    if len(tokens) != vocab:
        raise GGUFError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, but token_embd.weight"
            f" has {vocab} rows"
        )
    return vocab


def _read_vocab_used(file: GGUFFile, vocab: int) -> int:
    """Returns the rows before the trailing ones whose token type is unused."""
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return vocab
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or types.size != vocab:
        raise GGUFError(
            f"{file.path}: tokenizer.ggml.token_type must be {vocab} integers, one a row of"
            f" token_embd.weight; it is {quoted(types)}"
        )
    used = np.flatnonzero(types != UNUSED_TOKEN)
    if not used.size:
        raise GGUFError(
            f"{file.path}: tokenizer.ggml.token_type marks all {vocab} tokens as unused"
        )
    return int(used[-1]) + 1
