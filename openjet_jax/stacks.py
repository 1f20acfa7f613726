"""From the leaves of a checkpoint to `Weights`: each plane of each layer read into its stack.

Leaves are read by several threads straight into the memory where they stay; orbax would restore
each into fresh memory, to be copied once more. On a CPU the filled stack becomes the device's array
as it is, elsewhere it is sent in one piece, or layer by layer to be tiled (`placing`). So memory
peaks at the weights (on the host of an accelerator, at the largest stack).
A table of packed rows is mapped: on a CPU the device's array is the file itself, and a row is read
when it is used.
"""

import collections
import dataclasses
import math
import os
import types
import typing
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import equinox as eqx
import jax
import numpy as np

from openjet_jax.checkpoint import (
    CONFIG_FILE,
    VALUES,
    CheckpointConfig,
    CheckpointError,
    TensorEntry,
    checksum,
    leaf_file,
    read_config,
)
from openjet_jax.config import ModelConfig, Qwen4ExpConfig, Qwen35Config
from openjet_jax.leaf_files import DIFFERS, TASK_BYTES, Part, damaged, read_parts
from openjet_jax.placing import Unread
from openjet_jax.qwen4exp_weights import Qwen4ExpWeights
from openjet_jax.row_tables import ROWS, map_rows, read_here_and_there, rows_path
from openjet_jax.weights import Packed, Qwen35Weights, RowTable, Weights
from pallas_kernels.formats import FORMATS

_WEIGHTS: dict[type[ModelConfig], Any] = {
    Qwen35Config: Qwen35Weights,
    Qwen4ExpConfig: Qwen4ExpWeights,
}
"""The class of each model's weights."""

READ_AHEAD_BYTES = 512 * 2**20
"""Host memory that may be in flight, beside the stack being sent."""

CHECKED_TABLE_BYTES = 2**28
"""Largest table of packed rows that is summed where it is only mapped."""

XLA_ALIGNMENT = 64
HUGE_PAGE_BYTES = 2 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack(Unread):
    """A leaf of `Weights` to be: one plane of the layers that share a format."""

    entries: tuple[TensorEntry, ...]
    plane: str
    stacked: bool

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the stack."""
        plane = self.entries[0].planes[self.plane]
        layers = (len(self.entries),) if self.stacked else ()
        return jax.ShapeDtypeStruct((*layers, *plane.shape), np.dtype(plane.dtype))

    def layer(self, slot: int | None) -> Self:
        """Returns one layer of the stack, or all of it with None."""
        return self if slot is None else dataclasses.replace(self, entries=(self.entries[slot],))


def weight_specs(directory: Path) -> tuple[ModelConfig, Weights]:
    """Returns the model's configuration and its weights as `jax.ShapeDtypeStruct`s, unread.

    Raises:
      CheckpointError: see `read_config`.
    """
    config = read_config(directory)
    return config.model, specs_of(config)


def specs_of(config: CheckpointConfig) -> Weights:
    """Returns a ShapeDtypeStruct in place of every array of the weights.

    Raises:
      CheckpointError: the tensors are not those of the model.
    """
    return jax.tree.map(lambda stack: stack.spec, unread(config))


def load_weights(directory: Path) -> tuple[ModelConfig, Weights]:
    """Returns the model's configuration and its weights, on JAX's default device.

    Every byte is checked against the checksum in config.json, but for those of a large table of
    packed rows on a CPU: see `leaf_files.verify`.

    Raises:
      CheckpointError: see `read_config`; `DamagedCheckpoint` where a leaf is missing, or not as it
        was written.
    """
    config = read_config(directory)
    stacks, tree = jax.tree.flatten(unread(config))
    with Reader(directory, [(stack, None) for stack in stacks]) as reader:
        loaded = [sent(reader.take(stack)) for stack in stacks]
    return config.model, jax.tree.unflatten(tree, loaded)


def sent(array: np.ndarray) -> jax.Array:
    """Returns an array on JAX's default device, when it has arrived there."""
    return jax.device_put(array, may_alias=True).block_until_ready()


class Reader:
    """Reads stacks, or layers of them, by several threads, ahead of who takes them."""

    def __init__(self, directory: Path, wanted: Iterable[tuple[Stack, int | None]]):
        """Takes what will be asked for, in order: stacks, and which layer of each."""
        self._directory = directory
        self._wanted = collections.deque(wanted)
        self._readings: collections.deque[tuple[Stack, int | None, _Reading | _Mapped]]
        self._readings = collections.deque()
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="restore")

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops reading."""
        self._pool.shutdown(cancel_futures=True)

    def take(self, stack: Stack, slot: int | None = None) -> np.ndarray:
        """Returns the next array that was to be asked for.

        Raises:
          DamagedCheckpoint: a leaf is missing, or not as it was written.
        """
        while self._wanted and (not self._readings or self._ahead() <= READ_AHEAD_BYTES):
            self._start(*self._wanted.popleft())
        expected, at, reading = self._readings.popleft()
        assert expected is stack and at == slot, "stacks are taken in another order than was said"
        return reading.finish()

    def _ahead(self) -> int:
        return sum(reading.array.nbytes for *_, reading in self._readings)

    def _start(self, stack: Stack, slot: int | None) -> None:
        if stack.plane == ROWS:
            reading = _Mapped(self._directory, stack)
        else:
            reading = _Reading(self._pool, self._directory, stack.layer(slot))
        self._readings.append((stack, slot, reading))


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory aligned as XLA demands of arrays that it is to use without a copy.

    Large arrays begin on a huge page, so that few small pages are faulted in.
    """
    size = math.prod(shape) * dtype.itemsize
    alignment = HUGE_PAGE_BYTES if size >= 2 * HUGE_PAGE_BYTES else XLA_ALIGNMENT
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


class _Reading:
    """A stack on its way into memory.

    Attributes:
      array: the stack, whole when `finish` has returned.
    """

    def __init__(self, pool: ThreadPoolExecutor, directory: Path, stack: Stack):
        """Starts reading, in tasks of similar sizes: few, since handing one over takes a while."""
        self.array = _empty(stack.spec.shape, stack.spec.dtype)
        self._stack = stack
        slots = self.array if stack.stacked else self.array[None]
        self._paths = [
            leaf_file(directory, entry.block, entry.field, stack.plane, slots[0].ndim)
            for entry in stack.entries
        ]
        data = slots.reshape(len(slots), -1).view(np.uint8)
        size = data.shape[1]
        parts = [
            Part(leaf, path, data[leaf, start : start + TASK_BYTES], start, size)
            for leaf, path in enumerate(self._paths)
            for start in range(0, size, TASK_BYTES)
        ]
        count = max(1, TASK_BYTES // size)
        tasks = [parts[i : i + count] for i in range(0, len(parts), count)]
        self._tasks = [pool.submit(read_parts, task) for task in tasks]

    def finish(self) -> np.ndarray:
        """Returns the stack when everything is read.

        Raises:
          DamagedCheckpoint: a file is missing, or not as it was written.
        """
        totals = [0] * len(self._paths)
        for task in self._tasks:
            for leaf, part_sum in task.result():
                totals[leaf] += part_sum
        for entry, path, total in zip(self._stack.entries, self._paths, totals, strict=True):
            if f"{total % 2**64:016x}" != entry.planes[self._stack.plane].checksum:
                raise damaged(path, DIFFERS)
        return self.array


class _Mapped:
    """A table of packed rows, which is mapped.

    Attributes:
      array: the table's file.
    """

    def __init__(self, directory: Path, stack: Stack):
        """Maps the file."""
        (self._entry,) = stack.entries
        self._path = rows_path(directory, self._entry.block)
        self.array, self._mapping = map_rows(directory, self._entry)

    def finish(self) -> np.ndarray:
        """Returns the map, summed where it is small or is read anyway, to be sent to a device.

        Raises:
          CheckpointError: it is not as it was written.
        """
        stays = jax.default_backend() == "cpu"
        if not stays or self.array.nbytes <= CHECKED_TABLE_BYTES:
            if checksum(self.array) != self._entry.planes[ROWS].checksum:
                raise damaged(str(self._path), DIFFERS)
        if stays:
            read_here_and_there(self._mapping)
        return self.array


def unread(config: CheckpointConfig) -> Weights:
    """Returns a `Stack` in place of every array of the weights, for a `Reader`.

    Raises:
      CheckpointError: the tensors are not those of the model.
    """
    fields: dict[str, list[TensorEntry]] = {}
    for entry in sorted(config.tensors, key=lambda entry: entry.slot):
        fields.setdefault(entry.field, []).append(entry)
    for field, entries in fields.items():
        if [entry.slot for entry in entries] != list(range(len(entries))):
            raise CheckpointError(f"{CONFIG_FILE}: a layer of {field} is missing or there twice")
    if "head" not in fields and "embedding" in fields:  # A tied head.
        fields["head"] = fields["embedding"]
    unplaced = set(fields)
    weights = _module(_WEIGHTS[type(config.model)], "", fields, unplaced)
    if unplaced:
        raise CheckpointError(f"{CONFIG_FILE}: unknown weights {', '.join(sorted(unplaced))}")
    return weights


def _module(cls: Any, prefix: str, fields: dict[str, list[TensorEntry]], unplaced: set[str]) -> Any:
    """Returns a module of `weights.py`, its fields told apart by their annotations."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.metadata.get("static"):  # Not an array: it has a default.
            continue
        name = prefix + field.name
        kind, *rest = _alternatives(field.type)
        unplaced.discard(name)
        if not any(f == name or f.startswith(f"{name}.") for f in fields):
            if types.NoneType not in rest:
                raise CheckpointError(f"{CONFIG_FILE}: no weights for {name}")
            values[field.name] = None
        elif kind is Packed:
            values[field.name] = _packed(fields[name])
        elif kind is RowTable:
            values[field.name] = _row_table(fields[name][0])
        elif issubclass(kind, eqx.Module):
            values[field.name] = _module(kind, f"{name}.", fields, unplaced)
        else:
            stacked = kind.dim_str.startswith("layers")
            values[field.name] = Stack(entries=tuple(fields[name]), plane=VALUES, stacked=stacked)
    return cls(**values)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the annotation itself."""
    return typing.get_args(annotation) or (annotation,)


def _row_table(entry: TensorEntry) -> RowTable:
    rows: Any = Stack(entries=(entry,), plane=ROWS, stacked=False)
    return RowTable(rows=rows, format=entry.format, width=entry.shape[1])


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
            plane: Stack(entries=tuple(group), plane=plane, stacked=True)
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
