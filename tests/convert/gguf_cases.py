"""Files for tests: a small valid qwen35, changed at will; malformed ones; mutations."""

import json
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np

DATA = pathlib.Path(__file__).parents[1] / "data"
MALFORMED = {
    "qwen35": DATA / "malformed",
    "qwen4exp": DATA / "golden_qwen4exp" / "malformed",
}
"""Folders of malformed files, by architecture."""

EXPECTED = {
    name: json.loads((folder / "expected.json").read_text()) for name, folder in MALFORMED.items()
}
"""What must become of them."""

type Keys = Mapping[str, Any]
type Tensors = dict[str, np.ndarray]


def behaves(case: Mapping[str, Any], path: pathlib.Path, message: str | None) -> bool:
    """Returns whether a file was read (without a message) or refused as it was expected."""
    if message is None:
        return case["expect"] != "error"
    rest = message.replace(str(path), "").lower()
    return case["expect"] != "load" and any(word.lower() in rest for word in case["mention"])


class U32(int):
    """A Python integer to be written as u32; plain ones are i32."""


def small_keys(**changes: object) -> dict[str, Any]:
    """Returns the keys of a model of two layers; `changes` by name with __ for the full stop."""
    keys: dict[str, Any] = {
        "block_count": U32(2),
        "context_length": U32(512),
        "embedding_length": U32(8),
        "feed_forward_length": U32(12),
        "attention.head_count": U32(2),
        "attention.head_count_kv": U32(1),
        "attention.key_length": U32(8),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": U32(2),
        "rope.dimension_count": U32(4),
        "rope.dimension_sections": [1, 1, 0, 0],
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": U32(4),
        "ssm.state_size": U32(4),
        "ssm.group_count": U32(1),
        "ssm.time_step_rank": U32(2),
        "ssm.inner_size": U32(8),
    }
    keys = {f"qwen35.{name}": value for name, value in keys.items()}
    for name, value in changes.items():
        keys[f"qwen35.{name.replace('__', '.')}"] = value
    return {"general.architecture": "qwen35"} | keys


_FFN: dict[str, tuple[int, ...]] = {
    "attn_norm.weight": (8,),
    "post_attention_norm.weight": (8,),
    "ffn_gate.weight": (12, 8),
    "ffn_up.weight": (12, 8),
    "ffn_down.weight": (8, 12),
}
_DELTANET = _FFN | {
    "attn_qkv.weight": (16, 8),
    "attn_gate.weight": (8, 8),
    "ssm_alpha.weight": (2, 8),
    "ssm_beta.weight": (2, 8),
    "ssm_conv1d.weight": (16, 4),
    "ssm_dt.bias": (2,),
    "ssm_a": (2,),
    "ssm_norm.weight": (4,),
    "ssm_out.weight": (8, 8),
}
_ATTENTION = _FFN | {
    "attn_q.weight": (32, 8),
    "attn_k.weight": (8, 8),
    "attn_v.weight": (8, 8),
    "attn_output.weight": (8, 16),
    "attn_q_norm.weight": (8,),
    "attn_k_norm.weight": (8,),
}
_MTP = _ATTENTION | {
    "nextn.eh_proj.weight": (8, 16),
    "nextn.enorm.weight": (8,),
    "nextn.hnorm.weight": (8,),
    "nextn.shared_head_norm.weight": (8,),
}


def small_tensors(mtp: bool = False, kinds: str = "da") -> Tensors:
    """Returns float32 tensors of a model; `kinds` has d for Gated DeltaNet and a for attention."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (24, 8),
        "output_norm.weight": (8,),
        "output.weight": (24, 8),
    }
    blocks = [_DELTANET if kind == "d" else _ATTENTION for kind in kinds]
    if mtp:
        blocks.append(_MTP)
    for i, block in enumerate(blocks):
        shapes |= {f"blk.{i}.{suffix}": shape for suffix, shape in block.items()}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(path: pathlib.Path, keys: Keys, tensors: Tensors) -> pathlib.Path:
    """Writes a file with the `gguf` package; a key with the value None is left out."""
    writer = gguf.GGUFWriter(path, str(keys.get("general.architecture", "none")))
    writer.kv_data[0].pop("general.architecture")
    for name, value in keys.items():
        if isinstance(value, U32):
            writer.add_uint32(name, value)
        elif value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mutations(content: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Yields damaged copies of a file, the same for every run.

    A third have bytes of the header changed, a third a 64-bit number overwritten by an extreme one,
    a sixth are cut, a sixth have a piece repeated or taken out.
    """
    header = min(len(content), 8192)
    extremes = (0, 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**60, 2**62, 2**63, 2**64 - 1)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        damaged = bytearray(content)
        at = int(rng.integers(header - 8))
        if seed % 3 == 0:
            for _ in range(rng.integers(1, 5)):
                damaged[rng.integers(header)] = rng.integers(256)
        elif seed % 3 == 1:
            damaged[at : at + 8] = struct.pack("<Q", extremes[rng.integers(len(extremes))])
        elif seed % 2:
            del damaged[at if rng.integers(2) else rng.integers(len(content)) :]
        else:
            piece = damaged[at : at + int(rng.integers(1, 64))]
            damaged[at : at + (len(piece) if rng.integers(2) else 0)] = piece * 2
        yield f"mutation {seed} at {at}", bytes(damaged)
