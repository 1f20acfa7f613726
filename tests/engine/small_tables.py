"""Tokenizer tables small enough to read, in the form a GGUF file has them."""

import pathlib
from typing import Any

from openjet_jax.vocabulary import CHAR_OF_BYTE

SHARED = pathlib.Path(__file__).parents[3] / "shared"

MERGES = ["Ġ t", "h e", "Ġt he", "i n", "i m", "im _", "e n", "en d", "Ċ Ċ", "Ġ Ġ", "Ã ©", "à ¤"]
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_pad_single>"]
USER_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PADDING = 5


def small_tables() -> dict[str, Any]:
    """Returns a tokenizer's keys: 256 bytes, a few merges, added tokens, padding rows."""
    bytes_ = [CHAR_OF_BYTE[byte] for byte in range(256)]
    merged = [merge.replace(" ", "") for merge in MERGES]
    unused = [f"[PAD{i}]" for i in range(PADDING)]
    tokens = [*bytes_, *merged, *CONTROL_TOKENS, *USER_TOKENS, *unused]
    sizes = (len(bytes_) + len(merged), len(CONTROL_TOKENS), len(USER_TOKENS), PADDING)
    kinds = [kind for kind, size in zip((1, 3, 4, 5), sizes, strict=True) for _ in range(size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
