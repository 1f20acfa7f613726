"""From a GGUF file to a checkpoint: one block in memory at a time, all or nothing on disk."""

import collections
import contextlib
import dataclasses
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from openjet_jax.checkpoint import (
    DENSE,
    TEMPLATE_FILE,
    VALUES,
    CheckpointConfig,
    PlaneEntry,
    TensorEntry,
    default_destination,
    is_checkpoint,
    write_block,
    write_config,
)
from openjet_jax.convert.block_formats import packed_format_of, repack
from openjet_jax.convert.gguf import GGUFError
from openjet_jax.convert.model_file import ModelFile, read_model
from openjet_jax.convert.publication import published_directory
from openjet_jax.convert.tensor_sources import TensorSource
from openjet_jax.draft_list import carry_list
from openjet_jax.program_store import say
from openjet_jax.row_tables import ROWS, write_rows
from openjet_jax.tokenizer import Tokenizer
from pallas_kernels.formats import FORMATS

SPARE_BYTES = 64 * 2**20
"""Room on disk for what is not weights: tokenizer, contents, the file system's own."""

SLAB_BYTES = 16 * 2**20
"""Of a table of rows, repacked at once."""

_HASH_BYTES = 4 * 2**20


def convert_gguf(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    wait: bool = False,
    quiet: bool = False,
) -> Path:
    """Returns the directory of the checkpoint made from a GGUF file, values unchanged.

    The destination appears when it is complete. A run that fails or is killed leaves none, and what
    it left beside it is removed by the next.

    Args:
      source: a GGUF file, or any part of a split one.
      destination: the checkpoint's directory; by default `default_destination(source)`.
      force: whether to replace an existing destination, which stays until the new one is complete.
        The list of tokens that it drafts over is taken over where the tokenizer is the same.
      wait: whether to wait for another process that is writing the destination.
      quiet: whether to show no progress.

    Raises:
      GGUFError: the source is not a sound model of a supported kind.
      FileExistsError: the destination exists, and is no checkpoint or `force` is not given.
      BlockingIOError: another process is writing the destination and `wait` is not given.
      OSError: not enough room on the disk, or another refusal of the system.
    """
    source = Path(source)
    target = default_destination(source.absolute()) if destination is None else Path(destination)
    target = target.resolve()
    if force and target.exists() and not is_checkpoint(target):
        raise FileExistsError(f"{target} is not a checkpoint; it is not replaced, even by force")
    model = read_model(source)
    planned = describe(model)
    tokenizer = Tokenizer.from_tables(model.file.metadata)
    with published_directory(target, force=force, wait=wait) as partial:
        _check_room(partial, target, planned.nbytes + SPARE_BYTES)
        stop = threading.Event()
        with ThreadPoolExecutor(1) as hasher, _progress(quiet, source.name, model) as advance:
            digests = hasher.submit(_digests, model.parts, stop)
            try:
                tensors = _write_weights(model, planned, partial, advance)
                files = _with_digests(planned.provenance["files"], digests.result(), model.parts)
            finally:
                stop.set()
        tokenizer.save(partial)
        if isinstance(template := model.file.metadata.get("tokenizer.chat_template"), str):
            (partial / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        provenance = {**planned.provenance, "files": files}
        done = dataclasses.replace(planned, tensors=tensors, provenance=provenance)
        done = write_config(partial, done)
        if said := carry_list(target, partial, done.hash, tokenizer.vocab_used):
            say(said)
    return target


def describe(model: ModelFile) -> CheckpointConfig:
    """Returns what converting the file gives, with nothing read: checksums and digests are empty.

    Raises:
      GGUFError: a tensor's type cannot be packed.
    """
    files = [_file_facts(part) for part in model.parts]
    return CheckpointConfig(
        model=model.config,
        tensors=tuple(_planned(model, source) for source in model.sources),
        provenance={"files": files, "facts": model.facts},
        notes=model.notes,
    )


def _planned(model: ModelFile, source: TensorSource) -> TensorEntry:
    role = source.role
    form, planes = _packing(model, source)
    return TensorEntry(
        name=source.name,
        source_type=source.record.type.name,
        field=role.field if role.stack == "global" else f"{role.stack}.{role.field}",
        slot=role.slot,
        block=_block_of(source.name),
        format=form,
        shape=source.shape,
        planes=planes,
    )


def _packing(model: ModelFile, source: TensorSource) -> tuple[str, dict[str, PlaneEntry]]:
    """Returns the format that a tensor goes to, and its planes, checksums empty.

    Raises:
      GGUFError: no format holds its type, or rows of its length.
    """
    if source.role.kind == "dense":
        return DENSE, {VALUES: PlaneEntry(shape=source.shape, dtype="float32", checksum="")}
    kind = source.record.type
    form = packed_format_of(kind)
    if form is None:
        raise GGUFError(
            f"{model.file.path}: tensor {source.name} has type {kind.name}, which cannot be packed "
            "without rounding; quantise the model to another type"
        )
    try:
        specs = FORMATS[form].plane_specs(*source.shape)
    except ValueError as error:
        raise GGUFError(f"{model.file.path}: tensor {source.name}: {error}") from error
    planes = {
        plane: PlaneEntry(shape=spec.shape, dtype=np.dtype(spec.dtype).name, checksum="")
        for plane, spec in specs.items()
    }
    if source.role.kind == "rows":
        size = sum(plane.nbytes for plane in planes.values())
        shape = (source.shape[0], size // source.shape[0])
        planes = {ROWS: PlaneEntry(shape=shape, dtype="uint8", checksum="")}
    return form, planes


def _block_of(name: str) -> str:
    """Returns `blk.N` of a layer's tensor, otherwise the tensor's own name without its ending."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blk" else parts[0]


def _file_facts(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"name": path.name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns, "sha256": ""}


def _check_room(partial: Path, target: Path, need: int) -> None:
    have = shutil.disk_usage(partial).free
    if have < need:
        raise OSError(
            f"{target} needs {need / 1e9:.2f} GB, but the disk has {have / 1e9:.2f} GB free; make "
            "room, or choose a destination on another disk with -o"
        )


def _write_weights(
    model: ModelFile,
    planned: CheckpointConfig,
    partial: Path,
    advance: Callable[[int], None],
) -> tuple[TensorEntry, ...]:
    """Writes every block, the next being repacked meanwhile; returns the entries with checksums."""
    blocks: dict[str, list[tuple[TensorSource, TensorEntry]]] = {}
    for source, entry in zip(model.sources, planned.tensors, strict=True):
        blocks.setdefault(entry.block, []).append((source, entry))
    writes: collections.deque[Future[None]] = collections.deque()
    written: dict[tuple[str, str], Mapping[str, PlaneEntry]] = {}

    def pack(member: tuple[TensorSource, TensorEntry]) -> Mapping[str, np.ndarray]:
        planes = _planes(model, member[0])
        advance(member[0].nbytes)
        return planes

    def write(block: str, leaves: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        for field, planes in write_block(partial, block, leaves).items():
            written[block, field] = planes

    with ThreadPoolExecutor() as packers, ThreadPoolExecutor(1) as writer:
        for block, members in blocks.items():
            tables = [member for member in members if member[0].role.kind == "rows"]
            for source, entry in tables:
                plane = write_rows(partial, block, _row_slabs(model, source, advance))
                written[block, entry.field] = {ROWS: plane}
            members = [member for member in members if member not in tables]
            fields = [entry.field for _, entry in members]
            leaves = dict(zip(fields, packers.map(pack, members), strict=True))
            while writes:
                writes.popleft().result()
            if leaves:
                writes.append(writer.submit(write, block, leaves))
        while writes:
            writes.popleft().result()
    return tuple(
        dataclasses.replace(entry, planes=written[entry.block, entry.field])
        for entry in planned.tensors
    )


def _planes(model: ModelFile, source: TensorSource) -> Mapping[str, np.ndarray]:
    """Returns the planes of one tensor.

    Raises:
      GGUFError: a value or scale is not finite.
    """
    kind = source.record.type
    if source.role.packed:
        return _repacked(model, source, source.data)
    values = dequantize(source.data.reshape(-1), kind).reshape(source.shape)
    if not np.isfinite(values).all():
        raise GGUFError(f"{model.file.path}: tensor {source.name} has NaN or infinite values")
    return {VALUES: values.astype(np.float32)}


def _repacked(
    model: ModelFile, source: TensorSource, blocks: np.ndarray
) -> Mapping[str, np.ndarray]:
    try:
        return repack(blocks, source.record.type)[1]
    except ValueError as error:
        raise GGUFError(f"{model.file.path}: tensor {source.name}: {error}") from error


def _row_slabs(
    model: ModelFile, source: TensorSource, advance: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Yields packed rows, the planes of each side by side, some rows at a time."""
    data = source.data
    step = max(1, SLAB_BYTES // data.shape[1])
    for start in range(0, len(data), step):
        planes = _repacked(model, source, data[start : start + step])
        yield np.concatenate([plane.view(np.uint8) for plane in planes.values()], axis=1)
        advance(data[start : start + step].nbytes)


def _digests(parts: Sequence[Path], stop: threading.Event) -> list[str]:
    """Returns the SHA-256 of every file, in hex."""
    digests = []
    for part in parts:
        digest = hashlib.sha256()
        with open(part, "rb", buffering=0) as file:
            while not stop.is_set() and (piece := file.read(_HASH_BYTES)):
                digest.update(piece)
        digests.append(digest.hexdigest())
    return digests


def _with_digests(
    files: Sequence[Mapping[str, Any]], digests: Sequence[str], parts: Sequence[Path]
) -> list[dict[str, Any]]:
    """Returns the facts of the source files with their digests, if they are still the same."""
    for before, part in zip(files, parts, strict=True):
        if _file_facts(part) != before:
            raise OSError(f"{part} changed while it was converted; convert it again")
    return [{**file, "sha256": digest} for file, digest in zip(files, digests, strict=True)]


@contextlib.contextmanager
def _progress(quiet: bool, name: str, model: ModelFile) -> Iterator[Callable[[int], None]]:
    """Shows source bytes converted, on stderr; yields the function that counts them."""
    columns = (
        TextColumn("converting {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(name, total=sum(source.nbytes for source in model.sources))
        yield lambda amount: progress.advance(task, amount)
