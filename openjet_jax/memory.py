"""How much device memory a model needs, from its contents alone: nothing is loaded or compiled."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from openjet_jax.architectures import initial_state
from openjet_jax.checkpoint import DENSE, TensorEntry
from openjet_jax.config import DecodeConfig, ModelConfig
from openjet_jax.draft_list import DEFAULT_SIZE
from openjet_jax.draft_vocabulary import NUM_SLOTS
from openjet_jax.state import DecodeState, capacity_for

FLOAT_BYTES = 4


def host_memory() -> dict[str, int]:
    """Returns the machine's total and available memory in bytes, as far as Linux tells."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {"total": kib["MemTotal"] * 1024, "available": kib["MemAvailable"] * 1024}


def device_memory() -> int | None:
    """Returns the bytes the first device has left, None if it does not tell; a CPU's are host's."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return host_memory().get("available")
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def size_text(nbytes: int) -> str:
    """Returns a size in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device.

    Attributes:
      context: positions of the conversation.
      kv_dtype: format of the key-value caches.
      weights: packed weights by group; what shares another's weights is not counted again, the
        draft head's copy of the default list's rows is.
      kv_position: keys and values of one position, the MTP block's included, and its index keys.
      kv: the trunk's cache.
      mtp_kv: the MTP block's cache.
      recurrent: state of the Gated DeltaNet layers, the same at any context.
      other_state: token ids, penalties, drafts.
      workspace: temporary memory of the largest program, estimated: see `workspace_bytes`.
    """

    context: int
    kv_dtype: str
    weights: dict[str, int]
    kv_position: int
    kv: int
    mtp_kv: int
    recurrent: int
    other_state: int
    workspace: int

    @property
    def state(self) -> int:
        """What a conversation takes, and each further one."""
        return self.kv + self.mtp_kv + self.recurrent + self.other_state

    @property
    def total(self) -> int:
        """All of it at once."""
        return sum(self.weights.values()) + self.state + self.workspace


def memory_plan(
    config: ModelConfig, tensors: Sequence[TensorEntry], decode: DecodeConfig
) -> MemoryPlan:
    """Returns what a conversation of one model takes.

    Args:
      config: the model.
      tensors: contents of its checkpoint.
      decode: context, cache format and chunk sizes.
    """
    state: DecodeState = jax.eval_shape(lambda: initial_state(config, decode))
    kv, mtp_kv, recurrent = (_bytes(x) for x in (state.kv, state.mtp_kv, state.recurrent))
    return MemoryPlan(
        context=decode.context,
        kv_dtype=decode.kv_dtype,
        weights=_weight_groups(tensors) | _draft_head(config, tensors),
        kv_position=(kv + mtp_kv) // capacity_for(decode.context),
        kv=kv,
        mtp_kv=mtp_kv,
        recurrent=recurrent,
        other_state=_bytes(state) - kv - mtp_kv - recurrent,
        workspace=workspace_bytes(config, tensors, decode),
    )


def workspace_bytes(
    config: ModelConfig, tensors: Sequence[TensorEntry], decode: DecodeConfig
) -> int:
    """Returns an estimate of the temporary memory of the largest program.

    In plain JAX, matrices are unpacked to float32 on use. A cycle holds the head about three times
    (codes, values, values in the order of the product); prefill holds the projections of a layer
    about twice, and the activations of its rows. Within a fifth of what XLA reports for a CPU.
    """
    heads = {t.field: math.prod(t.shape) for t in tensors if t.field in ("embedding", "head")}
    by_parts = ("experts.gate", "experts.up", "experts.down", "ngrams.table")
    layers: dict[str, int] = {}
    for tensor in tensors:
        whole = tensor.format != DENSE and not tensor.field.endswith(by_parts)
        if whole and tensor.field not in heads:
            layers[tensor.block] = layers.get(tensor.block, 0) + math.prod(tensor.shape)
    activations = 3 * (config.ffn_width + config.conv_channels) * max(decode.chunks)
    prefill = 2 * max(layers.values()) + activations
    return FLOAT_BYTES * max(3 * heads.get("head", heads["embedding"]), prefill)


def _bytes(tree: object) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _weight_groups(tensors: Sequence[TensorEntry]) -> dict[str, int]:
    """Returns bytes by the first name of the field; what every layer has goes by its own."""
    names = {
        "embedding": "embedding",
        "head": "head",
        "final_norm": "head",
        "deltanet": "DeltaNet layers",
        "attention": "attention layers",
        "ffn": "feed-forward",
        "indexer": "attention layers",
        "mixer_streams": "residual streams",
        "ffn_streams": "residual streams",
        "final": "head",
        "experts": "experts",
        "ngrams": "n-gram table",
        "mtp": "MTP block",
    }
    groups = dict.fromkeys(names.values(), 0)
    for tensor in tensors:
        groups[names[tensor.field.split(".")[0]]] += tensor.nbytes
    return {name: nbytes for name, nbytes in groups.items() if nbytes}


def _draft_head(config: ModelConfig, tensors: Sequence[TensorEntry]) -> dict[str, int]:
    """Returns the bytes of the default list's rows and of the slots, where there is a list."""
    if not config.has_mtp or config.vocab_used <= DEFAULT_SIZE:
        return {}
    heads = {t.field: t.nbytes for t in tensors if t.field in ("embedding", "head", "mtp.head")}
    head = heads.get("mtp.head") or heads.get("head") or heads["embedding"]
    return {"draft head": head * (DEFAULT_SIZE + NUM_SLOTS) // config.vocab}
