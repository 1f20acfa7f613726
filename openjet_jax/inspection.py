"""What a model is and what it needs, from a checkpoint or a .gguf that is not converted."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from openjet_jax import leaf_files
from openjet_jax.checkpoint import CheckpointConfig
from openjet_jax.config import DecodeConfig
from openjet_jax.loading import contents, located
from openjet_jax.memory import memory_plan, size_text


def inspect(
    name: str | os.PathLike[str],
    *,
    context: int = 4096,
    kv_dtype: str = "bfloat16",
    verify: bool = False,
) -> dict[str, Any]:
    """Returns the facts about a model as JSON values; sizes are in bytes.

    Args:
      name: a checkpoint, a .gguf file, or `tiny`; no weights are read but to verify them.
      context: positions to plan memory for.
      kv_dtype: format of the key-value cache.
      verify: whether all weights of a checkpoint are read and checked; a .gguf has no checksums.

    Raises:
      ValueError: the model or a setting is not valid, or weights are not as they were written.
    """
    path, config = located(name), contents(name)
    decode = DecodeConfig(context=context, kv_dtype=kv_dtype)
    if context > config.model.context:
        raise ValueError(
            f"{context=} is more than the {config.model.context} positions the model knows"
        )
    if verify and not path.is_dir():
        raise ValueError(
            f"{path} has no checksums to verify; convert it, and verify the checkpoint"
        )
    plan = memory_plan(config.model, config.tensors, decode)
    return {
        "path": str(path),
        "kind": "checkpoint" if path.is_dir() else "gguf",
        "hash": config.hash or None,
        "verified_bytes": leaf_files.verify(path) if verify else None,
        "model": dataclasses.asdict(config.model),
        "parameters": config.num_parameters,
        "facts": config.provenance["facts"],
        "sources": config.provenance["files"],
        "notes": list(config.notes),
        "formats": _formats(config),
        "tensors": [
            {
                "name": tensor.name,
                "field": tensor.field,
                "slot": tensor.slot,
                "shape": list(tensor.shape),
                "type": tensor.source_type,
                "format": tensor.format,
                "bytes": tensor.nbytes,
            }
            for tensor in config.tensors
        ],
        "memory": dataclasses.asdict(plan) | {"total": plan.total},
    }


def render(facts: Mapping[str, Any]) -> str:
    """Returns the facts of `inspect` as text for a terminal, tensors of all layers in one line."""
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        console.print(Group(*_sections(facts)))
    return capture.get().rstrip("\n")


def _formats(config: CheckpointConfig) -> list[dict[str, Any]]:
    """Returns tensors, parameters and bytes by source type and packed format, largest first."""
    totals: dict[tuple[str, str], list[int]] = {}
    for tensor in config.tensors:
        total = totals.setdefault((tensor.source_type, tensor.format), [0, 0, 0])
        for i, amount in enumerate((1, math.prod(tensor.shape), tensor.nbytes)):
            total[i] += amount
    rows = [
        {"type": kind, "format": form, "tensors": count, "parameters": size, "bytes": nbytes}
        for (kind, form), (count, size, nbytes) in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _sections(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    model, memory = facts["model"], facts["memory"]
    name = facts["facts"].get("name", "")
    yield Text(f"{facts['path']}  ({facts['kind']})")
    yield Text(f"{name}  {facts['parameters']:,} parameters".strip())
    yield _model_table(model)
    yield Text.assemble("\n", ("formats", "bold"))
    yield _table(
        ("source", "packed", "tensors", "parameters", "size", "bits"),
        [
            (
                row["type"],
                row["format"],
                f"{row['tensors']:,}",
                f"{row['parameters']:,}",
                size_text(row["bytes"]),
                f"{8 * row['bytes'] / row['parameters']:.2f}",
            )
            for row in facts["formats"]
        ],
    )
    yield Text.assemble("\n", ("tensors", "bold"))
    yield _table(
        ("field", "shape", "layers", "source", "packed", "size"), _tensor_rows(facts["tensors"])
    )
    yield Text.assemble(
        "\n", ("memory", "bold"), f" for {memory['context']:,} positions, {memory['kv_dtype']} KV"
    )
    yield _table(("what", "size"), _memory_rows(memory))
    if facts["verified_bytes"] is not None:
        yield Text(f"verified: {size_text(facts['verified_bytes'])} of weights are as written")
    for note in facts["notes"]:
        yield Text(f"note: {note}")


def _model_table(model: Mapping[str, Any]) -> Table:
    recurrent = model["recurrent"]
    rows = [
        (
            "layers",
            f"{len(recurrent)}: {sum(recurrent)} DeltaNet, {recurrent.count(False)} attention",
        ),
        ("width", f"{model['hidden']}"),
        *_feed_forward(model),
        (
            "attention",
            f"{model['heads']} heads, {model['kv_heads']} KV, width {model['head_width']}"
            f" ({model['rotary']} rotary)",
        ),
        (
            "DeltaNet",
            f"{model['key_heads']} key heads, {model['value_heads']} value, width"
            f" {model['gdn_width']}, {model['conv_taps']} taps",
        ),
        ("vocabulary", f"{model['vocab']}, {model['vocab_used']} in use"),
        ("trained context", f"{model['context']:,}"),
        ("MTP block", "yes" if model["has_mtp"] else "no"),
    ]
    return _table(None, rows)


def _feed_forward(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what follows the mixers, and what else a model has beside them."""
    if "experts" not in model:
        return [("feed-forward", f"{model['ffn']}")]
    return [
        (
            "experts",
            f"{model['experts_used']} of {model['experts']}, width {model['expert_ffn']};"
            f" shared {model['shared_ffn']}",
        ),
        ("residual streams", f"{model['streams']}, rank {model['stream_rank']}"),
        ("sparse attention", f"{sum(model['sparse'])} layers, {model['budget']} blocks"),
        ("n-gram table", f"{model['ngram_rows']:,} rows, layer {model['ngram_layer']}"),
    ]


def _tensor_rows(tensors: list[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns one row for each field, type and format."""
    groups: dict[tuple[str, ...], list[int]] = {}
    order = list(dict.fromkeys(tensor["field"] for tensor in tensors))
    for tensor in sorted(tensors, key=lambda tensor: order.index(tensor["field"])):
        shape = " x ".join(map(str, tensor["shape"]))
        key = (tensor["field"], shape, tensor["type"], tensor["format"])
        groups.setdefault(key, []).append(tensor["bytes"])
    return [
        (field, shape, str(len(sizes)), kind, form, size_text(sum(sizes)))
        for (field, shape, kind, form), sizes in groups.items()
    ]


def _memory_rows(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(f"weights: {name}", size) for name, size in memory["weights"].items()]
    rows += [
        (f"keys and values, {size_text(memory['kv_position'])} a position", memory["kv"]),
        ("keys and values of the MTP block", memory["mtp_kv"]),
        ("recurrent state", memory["recurrent"]),
        ("other state", memory["other_state"]),
        ("workspace, estimated for plain JAX", memory["workspace"]),
        ("total", memory["total"]),
    ]
    return [(name, size_text(size)) for name, size in rows if size]


def _table(header: tuple[str, ...] | None, rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, show_header=header is not None, pad_edge=False, padding=(0, 2, 0, 0))
    for i in range(len(rows[0])):
        numeric = header is not None and i > 0 and rows[0][i][:1].isdigit()
        table.add_column(header[i] if header else "", justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*row)
    return table
