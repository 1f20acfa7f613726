"""What each tensor of a qwen35 GGUF is: its place in `Weights` and the shape the keys imply.

One table per kind of block. Names and shapes are those of llama.cpp's converter; a projection is
NumPy [out, in] and applied as `y = x @ W.T`.
"""

import dataclasses

from openjet_jax.config import ModelConfig
from openjet_jax.convert.gguf import TensorRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """A place in `Weights`.

    Attributes:
      stack: "global", "deltanet", "attention", "ffn", "mtp", "mtp.attention" or "mtp.ffn".
      field: name in the class of that stack in `openjet_jax.weights`; for "global", in `Weights`.
      slot: position along the stack's layer axis; 0 where there is none.
      packed: whether it becomes a layer of a `Packed`; otherwise it is a float32 array.
    """

    stack: str
    field: str
    slot: int
    packed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """A row of the table: name in the file, field in `Weights`, axes by the names of `sizes_of`."""

    suffix: str
    field: str
    axes: tuple[str, ...]
    packed: bool
    optional: bool = False
    fallback: str = ""


def _vector(suffix: str, field: str, axis: str, fallback: str = "") -> _Entry:
    optional = bool(fallback)
    axes = (axis,)
    return _Entry(
        suffix=suffix, field=field, axes=axes, packed=False, optional=optional, fallback=fallback
    )


def _matrix(suffix: str, field: str, rows: str, k: str, optional: bool = False) -> _Entry:
    return _Entry(suffix=suffix, field=field, axes=(rows, k), packed=True, optional=optional)


_GLOBAL = (
    _matrix("token_embd.weight", "embedding", "vocab", "hidden"),
    _vector("output_norm.weight", "final_norm", "hidden"),
    _matrix("output.weight", "head", "vocab", "hidden", optional=True),
)
_FFN = (
    _vector("post_attention_norm.weight", "norm", "hidden"),
    _matrix("ffn_gate.weight", "gate", "ffn", "hidden"),
    _matrix("ffn_up.weight", "up", "ffn", "hidden"),
    _matrix("ffn_down.weight", "down", "hidden", "ffn"),
)
_ATTENTION = (
    _vector("attn_norm.weight", "norm", "hidden"),
    _matrix("attn_q.weight", "q", "query_gate", "hidden"),
    _matrix("attn_k.weight", "k", "kv", "hidden"),
    _matrix("attn_v.weight", "v", "kv", "hidden"),
    _matrix("attn_output.weight", "out", "hidden", "attended"),
    _vector("attn_q_norm.weight", "q_norm", "head_width"),
    _vector("attn_k_norm.weight", "k_norm", "head_width"),
)
_DELTANET = (
    _vector("attn_norm.weight", "norm", "hidden"),
    _matrix("attn_qkv.weight", "qkv", "channels", "hidden"),
    _matrix("attn_gate.weight", "gate", "values", "hidden"),
    _matrix("ssm_alpha.weight", "alpha", "value_heads", "hidden"),
    _matrix("ssm_beta.weight", "beta", "value_heads", "hidden"),
    _Entry(suffix="ssm_conv1d.weight", field="conv", axes=("channels", "taps"), packed=False),
    _vector("ssm_dt.bias", "dt_bias", "value_heads"),
    _vector("ssm_a", "decay", "value_heads"),
    _vector("ssm_norm.weight", "gate_norm", "gdn_width"),
    _matrix("ssm_out.weight", "out", "hidden", "values"),
)
_MTP = (
    _vector("nextn.enorm.weight", "embed_norm", "hidden"),
    _vector("nextn.hnorm.weight", "hidden_norm", "hidden"),
    _matrix("nextn.eh_proj.weight", "join", "hidden", "joined"),
    _vector("nextn.shared_head_norm.weight", "head_norm", "hidden", "output_norm.weight"),
    _matrix("nextn.embed_tokens.weight", "embedding", "vocab", "hidden", optional=True),
    _matrix("nextn.shared_head_head.weight", "head", "vocab", "hidden", optional=True),
)
FUSED_QKV = "attn_qkv.weight"
FUSED_FIELDS = ("q", "k", "v")


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """Returns the length of every axis that the table names."""
    attended = config.heads * config.head_width
    return {
        "vocab": config.vocab,
        "hidden": config.hidden,
        "ffn": config.ffn,
        "query_gate": 2 * attended,
        "attended": attended,
        "kv": config.kv_heads * config.head_width,
        "head_width": config.head_width,
        "channels": config.conv_channels,
        "values": config.value_heads * config.gdn_width,
        "value_heads": config.value_heads,
        "gdn_width": config.gdn_width,
        "taps": config.conv_taps,
        "joined": 2 * config.hidden,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedTensor:
    """A tensor that a model of some configuration has.

    Attributes:
      name: full name in the file.
      shape: NumPy shape.
      role: where its values go.
      optional: whether a file may lack it.
      fallback: name of the tensor that then stands in for it; empty if none does.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    optional: bool
    fallback: str


def expected_tensors(config: ModelConfig) -> tuple[ExpectedTensor, ...]:
    """Returns every tensor of a model, globals first, then block by block, the MTP block last."""
    sizes = sizes_of(config)
    expected: list[ExpectedTensor] = []

    def add(prefix: str, stack: str, slot: int, entries: tuple[_Entry, ...]) -> None:
        for entry in entries:
            role = Role(stack=stack, field=entry.field, slot=slot, packed=entry.packed)
            shape = tuple(sizes[axis] for axis in entry.axes)
            name = prefix + entry.suffix
            expected.append(
                ExpectedTensor(
                    name=name,
                    shape=shape,
                    role=role,
                    optional=entry.optional,
                    fallback=entry.fallback,
                )
            )

    add("", "global", 0, _GLOBAL)
    slots = {"deltanet": 0, "attention": 0}
    for layer, recurrent in enumerate(config.recurrent):
        kind = "deltanet" if recurrent else "attention"
        add(f"blk.{layer}.", kind, slots[kind], _DELTANET if recurrent else _ATTENTION)
        add(f"blk.{layer}.", "ffn", layer, _FFN)
        slots[kind] += 1
    if config.has_mtp:
        prefix = f"blk.{config.num_layers}."
        add(prefix, "mtp.attention", 0, _ATTENTION)
        add(prefix, "mtp.ffn", 0, _FFN)
        add(prefix, "mtp", 0, _MTP)
    return tuple(expected)


def missing_mtp_tensors(names: dict[str, TensorRecord], block: int) -> list[str]:
    """Returns the names that block `block` lacks for being an MTP block; empty if it is whole."""
    prefix = f"blk.{block}."
    fused = prefix + FUSED_QKV in names
    return [
        prefix + entry.suffix
        for entry in (*_ATTENTION, *_FFN, *_MTP)
        if not entry.optional
        and not (fused and entry.field in FUSED_FIELDS)
        and prefix + entry.suffix not in names
    ]
