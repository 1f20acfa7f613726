"""Tables of packed rows on disk: files beside the blocks, mapped and never copied whole.

A table is too large to be read at loading, and little of it is ever used. Its file is the array.
"""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from openjet_jax.checkpoint import DamagedCheckpoint, PlaneEntry, TensorEntry, checksum

ROWS = "rows"
"""The one plane of a table of packed rows."""


def rows_path(directory: Path, block: str) -> Path:
    """Returns the file of a table of packed rows."""
    return directory / "rows" / block


def write_rows(directory: Path, block: str, slabs: Iterable[np.ndarray]) -> PlaneEntry:
    """Writes a table of packed rows, synced to disk, and returns its entry.

    Args:
      directory: of the checkpoint.
      block: name of the table.
      slabs: uint8 [rows, row bytes], in order; one is held at a time.
    """
    path = rows_path(directory, block)
    path.parent.mkdir(exist_ok=True)
    with open(path, "xb") as file:
        for slab in slabs:
            file.write(np.ascontiguousarray(slab).data)
            row_bytes = slab.shape[1]
        file.flush()
        os.fsync(file.fileno())
    table = np.memmap(path, np.uint8, "r").reshape(-1, row_bytes)
    return PlaneEntry(shape=table.shape, dtype=table.dtype.name, checksum=checksum(table))


def map_rows(directory: Path, entry: TensorEntry) -> tuple[np.ndarray, mmap.mmap]:
    """Returns a table of packed rows as a read-only view of a map, and the map. Nothing is read.

    Raises:
      DamagedCheckpoint: the file is missing or of another size.
    """
    path, plane = rows_path(directory, entry.block), entry.planes[ROWS]
    size = path.stat().st_size if path.is_file() else None
    if size != plane.nbytes:
        raise DamagedCheckpoint(
            f"{path} has {size} bytes where {plane.nbytes} were written; the checkpoint is "
            "incomplete or damaged, convert the model again"
        )
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, np.dtype(plane.dtype)).reshape(plane.shape), mapping


def read_here_and_there(mapping: mmap.mmap) -> None:
    """Tells the system to read the pages that are touched, not those around them.

    A look-up names rows all over the table: with the usual reading ahead, the first touch of a page
    takes tens of times as long (`bench/ngrams.py`).
    """
    if hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)
