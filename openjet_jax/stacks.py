"""From the leaves of a checkpoint to `Weights`: each plane of each layer read into its stack.

Leaves are read by several threads straight into the memory where they stay; orbax would restore
each into fresh memory, to be copied once more. On a CPU the filled stack becomes the device's array
as it is, elsewhere it is sent in one piece. So memory peaks at the weights (on the host of an
accelerator, at the largest stack), and nothing is compiled.
"""

import collections
import dataclasses
import math
import os
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from openjet_jax.checkpoint import (
    CONFIG_FILE,
    VALUES,
    CheckpointConfig,
    CheckpointError,
    TensorEntry,
    leaf_file,
    partial_checksum,
    read_config,
)
from openjet_jax.config import ModelConfig
from openjet_jax.weights import Packed, Weights
from pallas_kernels.formats import FORMATS

READ_AHEAD_BYTES = 512 * 2**20
"""Host memory that may be in flight, beside the stack being sent."""

PART_BYTES = 64 * 2**20
"""Read by one thread."""

PIECE_BYTES = 2**20
"""Read at once."""

XLA_ALIGNMENT = 64
HUGE_PAGE_BYTES = 2 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stack:
    """A leaf of `Weights` to be: one plane of the layers that share a format."""

    entries: tuple[TensorEntry, ...]
    plane: str
    stacked: bool

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        plane = self.entries[0].planes[self.plane]
        layers = (len(self.entries),) if self.stacked else ()
        return jax.ShapeDtypeStruct((*layers, *plane.shape), np.dtype(plane.dtype))


def weight_specs(directory: Path) -> tuple[ModelConfig, Weights]:
    """Returns the model's configuration and its weights as `jax.ShapeDtypeStruct`s, unread.

    Raises:
      CheckpointError: see `read_config`.
    """
    config = read_config(directory)
    return config.model, jax.tree.map(lambda stack: stack.spec, _layout(config))


def load_weights(directory: Path) -> tuple[ModelConfig, Weights]:
    """Returns the model's configuration and its weights, on JAX's default device.

    Every byte is checked against the checksum in config.json.

    Raises:
      CheckpointError: see `read_config`; or a leaf is missing, or not as it was written.
    """
    config = read_config(directory)
    stacks, tree = jax.tree.flatten(_layout(config))
    loaded: list[jax.Array] = []
    reading: collections.deque[tuple[np.ndarray, list[_LeafReading]]] = collections.deque()

    def send() -> None:
        array, leaves = reading.popleft()
        for leaf in leaves:
            leaf.finish()
        loaded.append(jax.device_put(array, may_alias=True).block_until_ready())

    pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="restore")
    try:
        for stack in stacks:
            array = _empty(stack.spec.shape, stack.spec.dtype)
            slots = array if stack.stacked else array[None]
            leaves = [
                _LeafReading(pool, directory, entry, stack.plane, slot)
                for entry, slot in zip(stack.entries, slots, strict=True)
            ]
            reading.append((array, leaves))
            while sum(array.nbytes for array, _ in reading) > READ_AHEAD_BYTES:
                send()
        while reading:
            send()
    finally:
        pool.shutdown(cancel_futures=True)
    return config.model, jax.tree.unflatten(tree, loaded)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory aligned as XLA demands of arrays that it is to use without a copy.

    Large arrays begin on a huge page, so that few small pages are faulted in.
    """
    size = math.prod(shape) * dtype.itemsize
    alignment = HUGE_PAGE_BYTES if size >= 2 * HUGE_PAGE_BYTES else XLA_ALIGNMENT
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


class _LeafReading:
    """One stored plane on its way into its slot."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        directory: Path,
        entry: TensorEntry,
        plane: str,
        slot: np.ndarray,
    ):
        """Starts reading."""
        self.entry, self.plane = entry, plane
        self.path = leaf_file(directory, entry.block, entry.field, plane, slot.ndim)
        data = slot.reshape(-1).view(np.uint8)
        self.parts = [
            pool.submit(_read, self.path, data, start) for start in range(0, data.size, PART_BYTES)
        ]

    def finish(self) -> None:
        """Waits until everything is read.

        Raises:
          CheckpointError: the file is missing, or not as it was written.
        """
        try:
            total = sum(part.result() for part in self.parts) % 2**64
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror or error})") from error
        if f"{total:016x}" != self.entry.planes[self.plane].checksum:
            raise self._error("is not what was written (its checksum differs)")

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: the {self.plane} of {self.entry.name} {what}; the checkpoint is "
            "incomplete or damaged, convert the model again"
        )


def _read(path: Path, data: np.ndarray, start: int) -> int:
    """Fills a part of `data` from a file of its size, and returns the part's checksum."""
    total, stop = 0, min(start + PART_BYTES, data.size)
    with open(path, "rb", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) != data.size:
            raise OSError(f"it has {size} bytes, not {data.size}")
        file.seek(start)
        # What was just read is summed while it is in the processor's cache.
        for at in range(start, stop, PIECE_BYTES):
            piece = data[at : min(at + PIECE_BYTES, stop)]
            if file.readinto(piece) != piece.size:
                raise OSError("it ended early")
            total += partial_checksum(piece, at)
    return total


def _layout(config: CheckpointConfig) -> Weights:
    """Returns `Weights` with a `_Stack` in place of every array."""
    fields: dict[str, list[TensorEntry]] = {}
    for entry in sorted(config.tensors, key=lambda entry: entry.slot):
        fields.setdefault(entry.field, []).append(entry)
    for field, entries in fields.items():
        if [entry.slot for entry in entries] != list(range(len(entries))):
            raise CheckpointError(f"{CONFIG_FILE}: a layer of {field} is missing or there twice")
    if "head" not in fields and "embedding" in fields:  # A tied head.
        fields["head"] = fields["embedding"]
    unplaced = set(fields)
    weights = _module(Weights, "", fields, unplaced)
    if unplaced:
        raise CheckpointError(f"{CONFIG_FILE}: unknown weights {', '.join(sorted(unplaced))}")
    return weights


def _module(cls: Any, prefix: str, fields: dict[str, list[TensorEntry]], unplaced: set[str]) -> Any:
    """Returns a module of `weights.py`, its fields told apart by their annotations."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        kind, *rest = _alternatives(field.type)
        unplaced.discard(name)
        if not any(f == name or f.startswith(f"{name}.") for f in fields):
            if types.NoneType not in rest:
                raise CheckpointError(f"{CONFIG_FILE}: no weights for {name}")
            values[field.name] = None
        elif kind is Packed:
            values[field.name] = _packed(fields[name])
        elif issubclass(kind, eqx.Module):
            values[field.name] = _module(kind, f"{name}.", fields, unplaced)
        else:
            stacked = kind.dim_str.startswith("layers")
            values[field.name] = _Stack(entries=tuple(fields[name]), plane=VALUES, stacked=stacked)
    return cls(**values)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the annotation itself."""
    return typing.get_args(annotation) or (annotation,)


def _packed(entries: list[TensorEntry]) -> Packed:
    """Returns one projection, its layers grouped by format in order of first use."""
    groups: dict[str, list[TensorEntry]] = {}
    table: list[tuple[int, int]] = []
    for entry in entries:
        group = groups.setdefault(entry.format, [])
        table.append((list(groups).index(entry.format), len(group)))
        group.append(entry)
    if unknown := groups.keys() - FORMATS.keys():
        raise CheckpointError(
            f"{CONFIG_FILE}: packed format {', '.join(sorted(unknown))} of {entries[0].field} is "
            f"unknown; this program has {', '.join(FORMATS)}"
        )
    rows, k = entries[0].shape
    for entry in entries:
        _check_planes(entry, rows, k)
    stacks: Any = tuple(
        {
            plane: _Stack(entries=tuple(group), plane=plane, stacked=True)
            for plane in FORMATS[name].plane_specs(rows, k)
        }
        for name, group in groups.items()
    )
    return Packed(stacks=stacks, formats=tuple(groups), table=tuple(table), shape=(rows, k))


def _check_planes(entry: TensorEntry, rows: int, k: int) -> None:
    """Raises CheckpointError unless the planes are those that this program's format has."""
    specs = FORMATS[entry.format].plane_specs(rows, k)
    expected = {name: (spec.shape, np.dtype(spec.dtype).name) for name, spec in specs.items()}
    found = {name: (plane.shape, plane.dtype) for name, plane in entry.planes.items()}
    if entry.shape != (rows, k) or found != expected:
        raise CheckpointError(
            f"{CONFIG_FILE}: {entry.name} has planes {found} of {list(entry.shape)} where "
            f"{entry.format} has {expected} of {[rows, k]}; convert the model again"
        )
