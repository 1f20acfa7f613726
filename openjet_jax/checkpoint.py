"""The checkpoint on disk: its contents list, and its weights through orbax.

    DIR/config.json     model, tensors with checksums, provenance, notes, one hash over it all
    DIR/weights/BLOCK/  one orbax checkpoint for each block: `blk.0`, `token_embd`, ...
    DIR/...             tokenizer and chat template, which this file does not know

A leaf is one plane of one layer's tensor, named `FIELD.PLANE` after its place in `Weights`. Blocks
are checkpoints of their own, so a conversion holds one at a time. Quantised bytes do not compress:
chunks are stored raw. `stacks.py` reads the leaves back.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openjet_jax.config import ModelConfig

KIND = "openjet-jax checkpoint"
VERSION = 1
CONFIG_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"

CHUNK_BYTES = 16 * 2**20
"""Most bytes of a stored chunk: several to a large plane, so that they are read in parallel, and
each far above the cost of finding it."""

DENSE = "dense"
"""Format of what is not a projection (norms, convolution taps): float32, one plane, `VALUES`."""

VALUES = "values"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, of another version, or not one at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaneEntry:
    """One stored array: its shape, the name of its dtype, and `checksum` of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the checkpoint.

    Attributes:
      name: the source's name for it.
      source_type: the source's format, such as `Q4_K`.
      field: its place in `Weights`, such as `ffn.gate` or `mtp.attention.q`.
      slot: its layer's position among the layers that have the field.
      block: the orbax checkpoint that holds it.
      format: name of its packed format, or `DENSE`.
      shape: of the values: (rows, k) of a projection.
      planes: what is stored, by name.
    """

    name: str
    source_type: str
    field: str
    slot: int
    block: str
    format: str
    shape: tuple[int, ...]
    planes: Mapping[str, PlaneEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Everything in config.json.

    Attributes:
      model: sizes of the model.
      tensors: every stored tensor, in source order.
      provenance: where the weights came from: files with sizes and SHA-256.
      notes: what a user should know about the source.
      hash: SHA-256 over the rest, the checksums of the weights included. Empty until written.
    """

    model: ModelConfig
    tensors: tuple[TensorEntry, ...]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    hash: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights, however they are packed."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def checksum(array: np.ndarray) -> str:
    """Returns 16 hex digits that change with a flipped bit, a zeroed page or a moved piece.

    The sum over 64 KiB pieces i of (2 i + 1) times the piece's sum of 64-bit words, modulo 2**64:
    as fast as memory, which a digest is not. Odd factors keep every bit. It finds damage, not
    forgery.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 65536 * 65536
    rest = np.zeros(8192, np.uint64)
    rest.view(np.uint8)[: data.size - whole] = data[whole:]
    pieces = data[:whole].view(np.uint64).reshape(-1, 8192)
    sums = np.append(pieces.sum(axis=1), rest.sum())
    factors = np.arange(1, 2 * sums.size, 2, dtype=np.uint64)
    return f"{int((sums * factors).sum()):016x}"


def write_block(
    directory: Path, block: str, leaves: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, dict[str, PlaneEntry]]:
    """Writes the planes of one block through orbax, synced to disk, and returns their entries.

    Args:
      directory: of the checkpoint.
      block: name of the block, not written before.
      leaves: planes by name, by field. They must not change until this returns.
    """
    import jax
    import orbax.checkpoint as ocp

    # The default handler copies every host array before writing it.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    tree = {field: dict(planes) for field, planes in leaves.items()}
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        path = (directory / "weights" / block).absolute()
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    return {
        field: {
            name: PlaneEntry(shape=plane.shape, dtype=plane.dtype.name, checksum=checksum(plane))
            for name, plane in planes.items()
        }
        for field, planes in tree.items()
    }


def write_config(directory: Path, config: CheckpointConfig) -> CheckpointConfig:
    """Writes config.json and returns `config` with its hash. One tensor a line, for readers."""
    content = _to_json(config)
    content["hash"] = _digest(content)
    tensors = ",\n".join(f"  {json.dumps(tensor)}" for tensor in content.pop("tensors"))
    head = json.dumps(content, indent=1, ensure_ascii=False)
    text = f'{head[:-2]},\n "tensors": [\n{tensors}\n ]\n}}\n'
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    return dataclasses.replace(config, hash=content["hash"])


def is_checkpoint(directory: Path) -> bool:
    """Returns whether a directory claims to be a checkpoint, of any version and in any state."""
    try:
        return f'"{KIND}"' in (directory / CONFIG_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def read_config(directory: Path) -> CheckpointConfig:
    """Returns what config.json says.

    Raises:
      CheckpointError: there is none, it is of another kind or version, or it was altered.
    """
    path = directory / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a checkpoint: no {CONFIG_FILE}; give a directory made by "
            "`openjet-jax convert`, or a .gguf file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; convert the model again") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise CheckpointError(f"{path} is not of an openjet-jax checkpoint: no kind {KIND!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: checkpoint version {content.get('version')!r}, but this program reads "
            f"version {VERSION}; convert the model again"
        )
    stated = content.pop("hash", None)
    if stated != _digest(content):
        raise CheckpointError(
            f"{path} does not match its own hash: it was damaged or edited; convert the model again"
        )
    try:
        return _from_json(content, stated)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}; convert the model again") from error


def _digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the content in a form that white space does not change."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _to_json(config: CheckpointConfig) -> dict[str, Any]:
    content = {"kind": KIND, "version": VERSION, **dataclasses.asdict(config)}
    del content["hash"]
    # Tuples become lists, as they will be when read.
    return json.loads(json.dumps(content))


def _from_json(content: Mapping[str, Any], stated: str) -> CheckpointConfig:
    model = content["model"]
    tensors: Sequence[Mapping[str, Any]] = content["tensors"]
    return CheckpointConfig(
        model=ModelConfig(**{**model, "recurrent": tuple(model["recurrent"])}),
        tensors=tuple(_tensor_from_json(tensor) for tensor in tensors),
        provenance=content["provenance"],
        notes=tuple(content["notes"]),
        hash=stated,
    )


def _tensor_from_json(tensor: Mapping[str, Any]) -> TensorEntry:
    planes = {
        name: PlaneEntry(**{**plane, "shape": tuple(plane["shape"])})
        for name, plane in tensor["planes"].items()
    }
    return TensorEntry(**{**tensor, "shape": tuple(tensor["shape"]), "planes": planes})
