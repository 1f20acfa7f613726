"""How much device memory a model needs, from its contents alone: nothing is loaded or compiled.

A plan is made before anything is allocated, and what does not fit is refused with what would.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from openjet_jax.architectures import initial_state
from openjet_jax.checkpoint import DENSE, CheckpointConfig, TensorEntry
from openjet_jax.config import ROWS, DecodeConfig, ModelConfig
from openjet_jax.device_memory import Room
from openjet_jax.draft_list import DEFAULT_SIZE
from openjet_jax.draft_vocabulary import NUM_SLOTS, with_draft_head
from openjet_jax.stacks import specs_of
from openjet_jax.state import DecodeState, capacity_for
from openjet_jax.tiling import tiled_weights
from openjet_jax.weights import Weights
from pallas_kernels.attention import BLOCK

FLOAT_BYTES = 4

TABLE = "n-gram table"
"""The group of weights that is mapped, not copied, where the device is the host."""


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
      workspace: temporary memory of the largest program, estimated (see `workspace_bytes`) unless
        `compiled`.
      compiled: whether the workspace is what a compiler said.
      mapped: of the weights, what is mapped and not held in memory.
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
    compiled: bool = False
    mapped: int = 0

    @property
    def state(self) -> int:
        """What a conversation takes, and each further one."""
        return self.kv + self.mtp_kv + self.recurrent + self.other_state

    @property
    def held(self) -> int:
        """Weights in memory."""
        return sum(self.weights.values()) - self.mapped

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.held + self.state + self.workspace

    def __str__(self) -> str:
        """Returns one line for people."""
        return (
            f"weights {size_text(self.held)}, state {size_text(self.state)} at {self.context:,} "
            f"positions, workspace {size_text(self.workspace)}"
        )


def loaded_specs(config: ModelConfig, tensors: Sequence[TensorEntry], backend: str) -> Weights:
    """Returns the shapes of a model's weights as `load` leaves them, drafting over the default.

    Args:
      config: the model.
      tensors: contents of its checkpoint.
      backend: "mosaic" or "reference".
    """
    specs = specs_of(CheckpointConfig(model=config, tensors=tuple(tensors), provenance={}))
    if config.has_mtp and config.vocab_used > DEFAULT_SIZE:
        ids = np.arange(DEFAULT_SIZE, dtype=np.int32)
        specs = jax.eval_shape(lambda w: with_draft_head(w, ids, config.vocab), specs)
    return tiled_weights(specs) if backend == "mosaic" else specs


def memory_plan(
    config: ModelConfig,
    tensors: Sequence[TensorEntry],
    decode: DecodeConfig,
    backend: str = "reference",
    host: bool = True,
) -> MemoryPlan:
    """Returns what a conversation of one model takes.

    Args:
      config: the model.
      tensors: contents of its checkpoint.
      decode: context, cache format and chunk sizes.
      backend: "mosaic" or "reference".
      host: whether the device is the CPU.
    """
    weights = _weight_groups(tensors) | _draft_head(config, tensors)
    if backend == "mosaic":
        both = _bytes(loaded_specs(config, tensors, backend)) - sum(weights.values())
        weights["rows that are looked up, twice"] = max(both, 0)
    decode = decode.on(backend)
    state: DecodeState = jax.eval_shape(lambda: initial_state(config, decode))
    kv, mtp_kv, recurrent = (_bytes(x) for x in (state.kv, state.mtp_kv, state.recurrent))
    return MemoryPlan(
        context=decode.context,
        kv_dtype=decode.kv_dtype,
        weights=weights,
        kv_position=(kv + mtp_kv) // capacity_for(decode.context),
        kv=kv,
        mtp_kv=mtp_kv,
        recurrent=recurrent,
        other_state=_bytes(state) - kv - mtp_kv - recurrent,
        workspace=workspace_bytes(config, tensors, decode, backend, host),
        mapped=weights.get(TABLE, 0) if host else 0,
    )


def largest_context(plan_of: Callable[[int], MemoryPlan], room: Room, most: int) -> int:
    """Returns the largest context whose plan fits, 0 where none does.

    Args:
      plan_of: the plan of a context; it grows with the context.
      room: what is free.
      most: the largest context that is asked about.
    """

    def fits(blocks: int) -> bool:
        return plan_of(min(blocks * BLOCK - ROWS, most)).total <= room.free

    low, high = 0, -(-(most + ROWS) // BLOCK)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(low * BLOCK - ROWS, most) if low else 0


def check_room(
    config: ModelConfig,
    tensors: Sequence[TensorEntry],
    decode: DecodeConfig,
    room: Room,
    backend: str = "reference",
    loaded: bool = False,
) -> MemoryPlan:
    """Returns the plan if there is room for it.

    Args:
      config: the model.
      tensors: contents of its checkpoint.
      decode: context, cache format and chunk sizes.
      room: what the device has free.
      backend: "mosaic" or "reference".
      loaded: whether the weights are there already, so that they need no room.

    Raises:
      ValueError: there is not; the message says what would fit.
    """

    def plan_of(context: int) -> MemoryPlan:
        shapes = dataclasses.replace(decode, context=context)
        return memory_plan(config, tensors, shapes, backend, room.host)

    plan = plan_of(decode.context)
    there = plan.held if loaded else 0
    if plan.total - there <= room.free:
        return plan
    whole = dataclasses.replace(room, free=room.free + there)
    largest = largest_context(plan_of, whole, decode.context)
    way_out = (
        f"the largest context that fits is {largest:,}"
        if largest
        else "no context fits: free what other programs hold, or take a smaller model"
    )
    raise ValueError(
        f"context={decode.context} does not fit: {size_text(plan.total - there)} are needed "
        f"({plan}), and {room.device} has {size_text(room.free)} free; {way_out}"
    )


def size_text(nbytes: int) -> str:
    """Returns a size in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def workspace_bytes(
    config: ModelConfig,
    tensors: Sequence[TensorEntry],
    decode: DecodeConfig,
    backend: str,
    host: bool,
) -> int:
    """Returns an estimate of the temporary memory of the largest program.

    In plain JAX, matrices are unpacked to float32 on use. A cycle holds the head (on a CPU three
    times: codes, values, values in the order of the product) and the logits of its rows about nine
    times; prefill holds the projections of a layer about twice, or on a GPU the largest of them,
    and the activations of its rows, half of them where kernels do the rest. What kernels read is
    not unpacked. A fifth above what XLA reports for a CPU at most; for a 27B on an RTX 3090 1 %
    above, on an H200 6 %.
    """
    if backend == "mosaic":
        tensors = [tensor for tensor in tensors if not _has_kernel(tensor)]
    heads = {t.field: math.prod(t.shape) for t in tensors if t.field in ("embedding", "head")}
    by_parts = ("experts.gate", "experts.up", "experts.down", "ngrams.table")
    together: dict[str, int] = {}
    for tensor in tensors:
        whole = tensor.format != DENSE and not tensor.field.endswith(by_parts)
        if whole and tensor.field not in heads:
            # What a CPU unpacks together, a GPU unpacks one by one.
            group = tensor.block if host else tensor.name
            together[group] = together.get(group, 0) + math.prod(tensor.shape)
    widths = config.ffn_width + config.conv_channels
    activations = math.ceil((1.6 if backend == "mosaic" else 3) * widths * max(decode.chunks))
    prefill = 2 * max(together.values(), default=0) + activations
    head = heads.get("head", 0 if backend == "mosaic" else heads["embedding"])
    copies = 3 if host else 1
    return FLOAT_BYTES * max(copies * head + 9 * ROWS * config.vocab, prefill)


def _has_kernel(tensor: TensorEntry) -> bool:
    """Whether a kernel reads a tensor, as `tiling.tiled` decides."""
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_words import ROWS, WEIGHTS

    whole = not tensor.shape[0] % ROWS and not tensor.shape[-1] % WEIGHTS
    return tensor.format in BLOCKS and whole


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
        "ngrams": TABLE,
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
