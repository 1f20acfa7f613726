"""The bytes of a checkpoint's files, summed as they are read."""

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from openjet_jax.checkpoint import (
    DamagedCheckpoint,
    TensorEntry,
    leaf_file,
    partial_checksum,
    read_config,
)
from openjet_jax.row_tables import ROWS, rows_path

TASK_BYTES = 32 * 2**20
"""Read by one thread at a time."""

PIECE_BYTES = 2**20
"""Read at once."""

DIFFERS = "it is not what was written: its checksum differs"


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes of a leaf from `start` on, and where they go."""

    leaf: int
    path: str
    data: np.ndarray
    start: int
    file_bytes: int


def read_parts(parts: list[Part]) -> list[tuple[int, int]]:
    """Fills parts from their files, and returns the leaf and the checksum of each.

    Raises:
      DamagedCheckpoint: a file is missing, or of another size.
    """
    sums = []
    for part in parts:
        total = 0
        try:
            with open(part.path, "rb", buffering=0) as file:
                if (size := os.fstat(file.fileno()).st_size) != part.file_bytes:
                    raise damaged(part.path, f"it has {size} bytes, not {part.file_bytes}")
                file.seek(part.start)
                # What was just read is summed while it is in the processor's cache.
                for at in range(0, part.data.size, PIECE_BYTES):
                    piece = part.data[at : at + PIECE_BYTES]
                    if file.readinto(piece) != piece.size:
                        raise damaged(part.path, "it ended early")
                    total += partial_checksum(piece, part.start + at)
        except OSError as error:
            raise damaged(part.path, f"it cannot be read: {error.strerror}") from error
        sums.append((part.leaf, total))
    return sums


def damaged(path: str, what: str) -> DamagedCheckpoint:
    """Returns the error of a file that is not as it was written."""
    return DamagedCheckpoint(
        f"{path}: {what}; the checkpoint is incomplete or damaged, convert the model again"
    )


def verify(directory: Path) -> int:
    """Returns how many bytes of weights a checkpoint has, all of them found as they were written.

    Loading checks the same of what it reads; a large table of packed rows it only maps.

    Raises:
      CheckpointError: see `read_config`; or a file is missing, or not as it was written.
    """
    config = read_config(directory)
    files = list(_files(directory, config.tensors))
    parts = [
        (leaf, path, start, size)
        for leaf, (path, size, _) in enumerate(files)
        for start in range(0, max(size, 1), TASK_BYTES)
    ]
    totals = [0] * len(files)
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="verify") as pool:
        for leaf, part_sum in pool.map(lambda part: _sum(*part), parts):
            totals[leaf] += part_sum
    for (path, _, stated), total in zip(files, totals, strict=True):
        if f"{total % 2**64:016x}" != stated:
            raise damaged(path, DIFFERS)
    return config.nbytes


def _sum(leaf: int, path: str, start: int, file_bytes: int) -> tuple[int, int]:
    """Returns a leaf, and what its bytes from `start` on add to its checksum."""
    data = np.empty(min(TASK_BYTES, file_bytes - start), np.uint8)
    return read_parts([Part(leaf, path, data, start, file_bytes)])[0]


def _files(directory: Path, tensors: tuple[TensorEntry, ...]) -> Iterator[tuple[str, int, str]]:
    """Yields the path, the size and the checksum of every file of weights."""
    for tensor in tensors:
        for name, plane in tensor.planes.items():
            if name == ROWS:
                path = str(rows_path(directory, tensor.block))
            else:
                path = leaf_file(directory, tensor.block, tensor.field, name, len(plane.shape))
            yield path, plane.nbytes, plane.checksum
