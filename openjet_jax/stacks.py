"""From the leaves of a checkpoint to `Weights`: each plane of each layer read into its stack.

Leaves are read through TensorStore, which is what orbax writes with, straight into the memory where
they stay; orbax itself would restore each into fresh memory, to be copied once more. On a CPU the
filled stack becomes the device's array as it is, elsewhere it is sent in one piece. So memory peaks
at the weights (on the host of an accelerator, at the largest stack), and nothing is compiled.
"""

import collections
import dataclasses
import math
import types
import typing
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import tensorstore as ts

from openjet_jax.checkpoint import (
    CONFIG_FILE,
    VALUES,
    CheckpointConfig,
    CheckpointError,
    TensorEntry,
    checksum,
    read_config,
)
from openjet_jax.config import ModelConfig
from openjet_jax.weights import Packed, Weights
from pallas_kernels.formats import FORMATS

READ_AHEAD_BYTES = 512 * 2**20
"""Host memory that may be in flight, beside the stack being sent."""


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
    context = ts.Context({"cache_pool": {"total_bytes_limit": 64 * 2**20}})
    loaded: list[jax.Array] = []
    reading: collections.deque[tuple[np.ndarray, list[Future[None]]]] = collections.deque()

    def send() -> None:
        array, parts = reading.popleft()
        for part in parts:
            part.result()
        loaded.append(jax.device_put(array, may_alias=True).block_until_ready())

    pool = ThreadPoolExecutor(thread_name_prefix="restore")
    try:
        for stack in stacks:
            array = _empty(stack.spec.shape, stack.spec.dtype)
            parts = array if stack.stacked else array[None]
            jobs = [
                pool.submit(_read, directory, entry, stack.plane, part, context)
                for entry, part in zip(stack.entries, parts, strict=True)
            ]
            reading.append((array, jobs))
            while sum(array.nbytes for array, _ in reading) > READ_AHEAD_BYTES:
                send()
        while reading:
            send()
    finally:
        pool.shutdown(cancel_futures=True)
    return config.model, jax.tree.unflatten(tree, loaded)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory aligned as XLA demands of arrays that it is to use without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _read(
    directory: Path, entry: TensorEntry, plane: str, target: np.ndarray, context: ts.Context
) -> None:
    """Fills `target` with one stored plane."""
    leaf = f"{entry.field}.{plane}"
    path = (directory / "weights" / entry.block).absolute()
    # Chunks are copied once, out of the page cache: with reads into a buffer between, half as fast.
    base = {"driver": "file", "path": f"{path}/", "file_io_mode": {"mode": "memmap"}}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{leaf}/"}
    try:
        store = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, context=context).result()
        if store.shape != target.shape or store.dtype.numpy_dtype != target.dtype:
            raise ValueError(f"it holds {store.dtype.name}{list(store.shape)}")
        ts.array(target, copy=False).write(store).result()
    except ValueError as error:
        raise CheckpointError(
            f"{path}: cannot read {leaf} of {entry.name}: {error}; the checkpoint is incomplete or "
            "damaged, convert the model again"
        ) from error
    if checksum(target) != entry.planes[plane].checksum:
        raise CheckpointError(
            f"{path}: {leaf} of {entry.name} is not what was written (checksum differs); the "
            "checkpoint is damaged, convert the model again"
        )


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
