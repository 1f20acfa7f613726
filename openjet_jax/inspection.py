"""What a model is and what it needs, from a checkpoint or a .gguf that is not converted."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from openjet_jax import leaf_files
from openjet_jax.checkpoint import CheckpointConfig
from openjet_jax.compiled import Programs
from openjet_jax.config import MAX_DEPTH, DecodeConfig
from openjet_jax.described import Card, card_of, sharding_on
from openjet_jax.device_memory import Room
from openjet_jax.loading import contents, located
from openjet_jax.memory import MemoryPlan, largest_context, loaded_specs, memory_plan, size_text
from openjet_jax.settings import Sampling
from openjet_jax.startup import MEMORY_FRACTION
from openjet_jax.tiling import resolve_backend


def inspect(
    name: str | os.PathLike[str],
    *,
    context: int = 4096,
    kv_dtype: str = "bfloat16",
    verify: bool = False,
    device: str | None = None,
    compiling: bool = False,
) -> dict[str, Any]:
    """Returns the facts about a model as JSON values; sizes are in bytes.

    Args:
      name: a checkpoint, a .gguf file, or `tiny`; no weights are read but to verify them.
      context: positions to plan memory for.
      kv_dtype: format of the key-value cache.
      verify: whether all weights of a checkpoint are read and checked; a .gguf has no checksums.
      device: one of `described.CARDS` to plan for; by default the one that JAX has.
      compiling: whether to compile the largest programs and take the workspace that they need; for
        a card this needs no card, but JAX's CUDA plugin and an assembler.

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
    card = None if device is None else card_of(device)
    backend = resolve_backend("auto") if card is None else card.backend
    host = card is None and jax.default_backend() == "cpu"

    def plan_of(context: int) -> MemoryPlan:
        shapes = dataclasses.replace(decode, context=context)
        plan = memory_plan(config.model, config.tensors, shapes, backend=backend, host=host)
        # What a program needs beside its arguments does not grow with the context.
        return plan if found is None else dataclasses.replace(plan, workspace=found, compiled=True)

    found = _workspace(config, decode, card, backend) if compiling else None
    plan = plan_of(context)
    memory = dataclasses.asdict(plan) | {"total": plan.total, "backend": backend}
    if card is not None:
        usable = int(MEMORY_FRACTION * card.memory_bytes)
        room = Room(device=card.name, host=False, total=card.memory_bytes, free=usable)
        memory["device"] = dataclasses.asdict(room) | {
            "fits": plan.total <= usable,
            "largest_context": largest_context(plan_of, room, config.model.context),
        }
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
        "memory": memory,
    }


def _workspace(
    config: CheckpointConfig, decode: DecodeConfig, card: Card | None, backend: str
) -> int:
    """Returns the temporary bytes of the larger of the programs that read and that decode."""
    specs = loaded_specs(config.model, config.tensors, backend)
    target = None if card is None else sharding_on(card)
    decode = decode.on(backend)
    programs = Programs(config.model, decode, specs, target=target)
    kind = Sampling(temperature=1.0, top_k=20, top_p=0.95).kind
    depth = MAX_DEPTH if config.model.has_mtp else 0
    programs.prepare(
        partial(programs.prefill, decode.chunks[-1]), partial(programs.cycles, kind, depth)
    )
    return max(programs.temporary_bytes().values())


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
        ("\nmemory", "bold"),
        f" for {memory['context']:,} positions, {memory['kv_dtype']} KV,"
        f" {memory['backend']} backend",
    )
    yield _table(("what", "size"), _memory_rows(memory))
    if facts["verified_bytes"] is not None:
        yield Text(f"verified: {size_text(facts['verified_bytes'])} of weights are as written")
    if device := memory.get("device"):
        verdict = "fits" if device["fits"] else "does not fit"
        yield Text(
            f"{verdict} {device['device']}, {size_text(device['free'])} of"
            f" {size_text(device['total'])}; the largest context that does:"
            f" {device['largest_context']:,}"
        )
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
    rows = [(f"weights: {name}", nbytes) for name, nbytes in memory["weights"].items()]
    rows += [
        (f"keys and values, {size_text(memory['kv_position'])} a position", memory["kv"]),
        ("keys and values of the MTP block", memory["mtp_kv"]),
        ("recurrent state", memory["recurrent"]),
        ("other state", memory["other_state"]),
        (f"workspace, {'compiled' if memory['compiled'] else 'estimated'}", memory["workspace"]),
        ("of the weights mapped, not held", memory["mapped"]),
        ("total", memory["total"]),
    ]
    return [(name, size_text(nbytes)) for name, nbytes in rows if nbytes]


def _table(header: tuple[str, ...] | None, rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, show_header=header is not None, pad_edge=False, padding=(0, 2, 0, 0))
    for i in range(len(rows[0])):
        numeric = header is not None and i > 0 and rows[0][i][:1].isdigit()
        table.add_column(header[i] if header else "", justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*row)
    return table
