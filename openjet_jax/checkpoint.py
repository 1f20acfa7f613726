"""The checkpoint on disk: its contents list, and its weights through orbax.

    DIR/config.json     model, tensors with checksums, provenance, notes, one hash over it all
    DIR/weights/BLOCK/  one orbax checkpoint for each block: `blk.0`, `token_embd`, ...
    DIR/rows/BLOCK      a table of packed rows, which is mapped where others are read
    DIR/...             tokenizer and chat template, which this file does not know

A leaf is one plane of one layer's tensor, named `FIELD.PLANE` after its place in `Weights`. Blocks
are checkpoints of their own, so a conversion holds one at a time. A leaf is a Zarr array of one
chunk, uncompressed (quantised bytes do not shrink): its file is the plane, and is read as such.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openjet_jax.config import ModelConfig, Qwen4ExpConfig, Qwen35Config

KIND = "openjet-jax checkpoint"
VERSION = 2
CONFIG_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"

CHECKED_BYTES = 65536
"""Bytes of the pieces that a checksum tells apart."""

CONFIGS = {config.architecture: config for config in (Qwen35Config, Qwen4ExpConfig)}
"""The configuration of each architecture."""

DENSE = "dense"
"""Format of what is not a projection (norms, convolution taps): float32, one plane, `VALUES`."""

VALUES = "values"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, of another version, or not one at all."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that has lost some of what was written; converting its source again mends it."""


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
    """Returns `partial_checksum` of a whole array, as 16 hex digits."""
    return f"{partial_checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8), 0):016x}"


def partial_checksum(data: np.ndarray, start: int) -> int:
    """Returns what some bytes add to a checksum modulo 2**64.

    The sum over pieces i of 64 KiB of (2 i + 1) times the sum of the piece's 64-bit words: as fast
    as memory, which a digest is not. Any flipped bit (factors are odd), zeroed page or moved piece
    changes it. It finds damage, not forgery.

    Args:
      data: uint8 [n].
      start: where they begin in the whole, a multiple of `CHECKED_BYTES`.
    """
    whole = data.size // CHECKED_BYTES * CHECKED_BYTES
    rest = np.zeros(-(-(data.size - whole) // 8), np.uint64)
    rest.view(np.uint8)[: data.size - whole] = data[whole:]
    pieces = data[:whole].view(np.uint64).reshape(-1, CHECKED_BYTES // 8)
    sums = np.append(pieces.sum(axis=1), rest.sum())
    first = 2 * (start // CHECKED_BYTES) + 1
    factors = np.arange(first, first + 2 * sums.size, 2, dtype=np.uint64)
    return int((sums * factors).sum())


def leaf_file(directory: Path, block: str, field: str, plane: str, ndim: int) -> str:
    """Returns the file that holds the bytes of a leaf: the only chunk of its Zarr array."""
    return f"{directory}/weights/{block}/{field}.{plane}/{'.'.join('0' * ndim)}"


def write_block(
    directory: Path, block: str, leaves: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, dict[str, PlaneEntry]]:
    """Writes the planes of one block through orbax, not yet synced, and returns their entries.

    Args:
      directory: of the checkpoint.
      block: name of the block, not written before.
      leaves: planes by name, by field, in C order. They must not change until this returns.

    Raises:
      CheckpointError: this version of orbax stores arrays in another way.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=_type_handlers()
    )
    tree = {field: dict(planes) for field, planes in leaves.items()}
    path = (directory / "weights" / block).absolute()
    with ocp.Checkpointer(handler) as checkpointer, _without_merge_warning():
        # Size 0: no limit to a chunk.
        args = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=0)
        checkpointer.save(path, args=args)
    for field, planes in tree.items():
        for name, plane in planes.items():
            file = leaf_file(directory, block, field, name, plane.ndim)
            if not os.path.exists(file) or os.path.getsize(file) != plane.nbytes:
                raise CheckpointError(f"{file} is not one raw chunk of {plane.nbytes} bytes")
    return {
        field: {
            name: PlaneEntry(shape=plane.shape, dtype=plane.dtype.name, checksum=checksum(plane))
            for name, plane in planes.items()
        }
        for field, planes in tree.items()
    }


def _type_handlers() -> Any:
    """Returns how orbax stores arrays: without a copy first, and without a sync for every file."""
    import jax
    import orbax.checkpoint as ocp
    import tensorstore as ts

    class HostArrays(ocp.type_handlers.NumpyHandler):
        async def serialize(self, values, infos, args=None):
            context = ts.Context({"file_io_sync": False})
            for info in infos:
                info.ts_context = context
            return await super().serialize(values, infos, args)

    return ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, HostArrays(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )


@contextlib.contextmanager
def _without_merge_warning() -> Iterator[None]:
    """Keeps orbax from warning, for each block, that there are no OCDBT files to merge."""
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def write_config(directory: Path, config: CheckpointConfig) -> CheckpointConfig:
    """Writes config.json and returns `config` with its hash. One tensor a line, for readers."""
    content = _to_json(config)
    content["hash"] = _digest(content)
    tensors = ",\n".join(f"  {json.dumps(tensor)}" for tensor in content.pop("tensors"))
    head = json.dumps(content, indent=1, ensure_ascii=False)
    text = f'{head[:-2]},\n "tensors": [\n{tensors}\n ]\n}}\n'
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    return dataclasses.replace(config, hash=content["hash"])


def default_destination(source: Path) -> Path:
    """Returns `NAME` beside `NAME.gguf`, or beside the parts `NAME-00001-of-0000N.gguf`."""
    stem = source.name.removesuffix(".gguf")
    base, _, total = stem.rpartition("-of-")
    first, _, number = base.rpartition("-")
    if first and len(number) == len(total) == 5 and number.isdigit() and total.isdigit():
        stem = first
    return source.with_name(stem if stem != source.name else f"{stem}.checkpoint")


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
    content["model"] = {"architecture": config.model.architecture, **content["model"]}
    del content["hash"]
    # Tuples become lists, as they will be when read.
    return json.loads(json.dumps(content))


def _from_json(content: Mapping[str, Any], stated: str) -> CheckpointConfig:
    tensors: Sequence[Mapping[str, Any]] = content["tensors"]
    return CheckpointConfig(
        model=_model_from_json(content["model"]),
        tensors=tuple(_tensor_from_json(tensor) for tensor in tensors),
        provenance=content["provenance"],
        notes=tuple(content["notes"]),
        hash=stated,
    )


def _model_from_json(model: Mapping[str, Any]) -> ModelConfig:
    values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in model.items()}
    return CONFIGS[values.pop("architecture")](**values)


def _tensor_from_json(tensor: Mapping[str, Any]) -> TensorEntry:
    planes = {
        name: PlaneEntry(**{**plane, "shape": tuple(plane["shape"])})
        for name, plane in tensor["planes"].items()
    }
    return TensorEntry(**{**tensor, "shape": tuple(tensor["shape"]), "planes": planes})
