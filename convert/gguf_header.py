"""Reads the header of one GGUF file: metadata and tensor records, every number checked before use.

A count or length is compared with the bytes that are left before anything of that size is made, so
that time and memory grow with the true header and not with what it claims. Layout: the GGUF
specification, versions 2 and 3, little-endian.
"""

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import NoReturn

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

VERSIONS = (2, 3)
"""Container versions with this layout; version 1 had 32-bit lengths."""

MAX_HEADER_BYTES = 64 * 2**20
"""Longest header that is read; one with 248,320 tokens and their merges has about 12 MiB."""

MAX_ENTRIES = 2**16
"""Most keys, and most tensors, of one file; the 27B model has 866 tensors."""

MAX_DIMENSIONS = 4
"""Most dimensions of a tensor."""

type Value = bool | int | float | str | np.ndarray | list[str]
"""A metadata value. Arrays of numbers are NumPy arrays, arrays of strings are lists."""

_SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
LONGEST_QUOTE = 80
"""Characters of a name or value that a message repeats."""

_U64 = struct.Struct("<Q")


class GGUFError(ValueError):
    """A file that cannot be used; the message names it, the cause, the value and the limit."""


def quoted(value: Value) -> str:
    """Returns the value for a message, cut so that a file cannot flood it."""
    if isinstance(value, list | np.ndarray):
        kind = "strings" if isinstance(value, list) else value.dtype.name
        return f"[array of {len(value)} {kind}]"
    if isinstance(value, str) and len(value) > LONGEST_QUOTE:
        value = value[:LONGEST_QUOTE] + "..."
    return repr(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Where one tensor lies.

    Attributes:
      name: as in the file.
      shape: NumPy order, so a projection is (out, in); the last axis is contiguous.
      type: the ggml type of its blocks.
      path: the part that holds it.
      offset: of its first byte in that part.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    path: Path
    offset: int

    @property
    def rows(self) -> int:
        """Product of all axes but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: its blocks follow each other, and so do rows."""
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_bytes

    @property
    def data(self) -> np.memmap:
        """A new read-only map uint8 [rows, row_bytes]; it is unmapped when the array goes."""
        shape = (self.rows, self.row_bytes)
        return np.memmap(self.path, np.uint8, "r", offset=self.offset, shape=shape)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Header:
    """What precedes the data of one file: its keys, and its tensors by name in file order."""

    metadata: dict[str, Value]
    tensors: dict[str, TensorRecord]


def read_header(path: Path) -> Header:
    """Returns the checked header of one file.

    Raises:
      GGUFError: the content is not a sound container.
      OSError: the system cannot open the file.
    """
    if path.exists() and not path.is_file():
        raise GGUFError(f"{path}: not a regular file")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise GGUFError(f"{path}: empty file, its size is 0 bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Cursor(path, content).header()


class _Cursor:
    """A cursor over the header of one file."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path = path
        self.content = content
        self.size = len(content)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.offset = 0

    def fail(self, message: str) -> NoReturn:
        raise GGUFError(f"{self.path}: {message}")

    def reserve(self, num_bytes: int, what: str) -> int:
        """Moves past `num_bytes`, wanted for `what`, and returns where they start."""
        start = self.offset
        if num_bytes > self.end - start:
            if self.end < self.size:
                self.fail(
                    f"{what} at byte {start} with {num_bytes} bytes would make the header longer"
                    f" than the limit of {MAX_HEADER_BYTES} bytes"
                )
            self.fail(
                f"truncated: {what} at byte {start} needs {num_bytes} bytes,"
                f" but the file ends at its size, {self.size}"
            )
        self.offset = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        return int.from_bytes(self.bytes(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.bytes(8, what), "little")

    def bytes(self, num_bytes: int, what: str) -> bytes:
        start = self.reserve(num_bytes, what)
        return self.content[start : self.offset]

    def string(self, what: str) -> str:
        raw = self.bytes(self.u64(f"length of {what}"), f"string {what}")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason} at byte {error.start} of {raw[:40]!r}")

    def strings(self, count: int, what: str) -> list[str]:
        """Returns `count` strings: the one loop that a real file runs half a million times."""
        values, content, end, offset = [], self.content, self.end, self.offset
        for i in range(count):
            start = offset + 8
            offset = start + _U64.unpack_from(content, offset)[0] if start <= end else end + 1
            if offset > end:
                self.fail(
                    f"truncated: string {i} of array {what} does not fit before byte {end}"
                    f" (file size {self.size}, longest header {MAX_HEADER_BYTES})"
                )
            try:
                values.append(content[start:offset].decode())
            except UnicodeDecodeError as error:
                self.fail(f"token or string {i} of {what} is not UTF-8: {error.reason}")
        self.offset = offset
        return values

    def value(self, key: str) -> Value:
        kind = self.value_type(key)
        if kind == GGUFValueType.STRING:
            return self.string(key)
        if kind == GGUFValueType.ARRAY:
            return self.array(key)
        dtype = _SCALARS[kind]
        return np.frombuffer(self.bytes(dtype.itemsize, key), dtype)[0].item()

    def value_type(self, key: str) -> GGUFValueType:
        number = self.u32(f"type of {key}")
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{key} has the unknown value type {number}; types are 0 to 12")

    def array(self, key: str) -> np.ndarray | list[str]:
        kind = self.value_type(f"array {key}")
        if kind == GGUFValueType.ARRAY:
            self.fail(f"{key} is an array of arrays; nested arrays are not supported")
        count = self.u64(f"count of array {key}")
        item_bytes = 8 if kind == GGUFValueType.STRING else _SCALARS[kind].itemsize
        start = self.reserve(count * item_bytes, f"array {key} of {count} elements")
        if kind == GGUFValueType.STRING:
            self.offset = start
            return self.strings(count, key)
        return np.frombuffer(self.content[start : self.offset], _SCALARS[kind])

    def name(self, what: str) -> str:
        name = self.string(what)
        if not name:
            self.fail(f"{what} is empty: a name needs at least one byte")
        return name

    def count(self, what: str, least_bytes: int) -> int:
        """Returns a count of entries, of `least_bytes` each, that the header can hold."""
        count = self.u64(f"{what} count")
        if count > (room := self.end // least_bytes):
            self.fail(
                f"{what} count {count} is false or the file is truncated: a header of {self.end}"
                f" bytes holds at most {room}"
            )
        if count > MAX_ENTRIES:
            self.fail(f"{what} count {count} is beyond the limit of {MAX_ENTRIES}")
        return count

    def header(self) -> Header:
        """Returns the whole header; the cursor starts at the first byte of the file."""
        if (magic := self.u32("magic")) != GGUF_MAGIC:
            self.fail(f"not a GGUF file: magic {magic:#010x}, expected {GGUF_MAGIC:#010x}")
        version = self.u32("version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "the file is big-endian" if swapped in VERSIONS else f"supported are {VERSIONS}"
            self.fail(f"container version {version}: {hint}")
        num_tensors = self.count("tensor", 33)
        metadata: dict[str, Value] = {}
        for i in range(self.count("metadata key", 14)):
            key = self.name(f"name of key {i}")
            if key in metadata:
                self.fail(f"duplicate key {quoted(key)}")
            metadata[key] = self.value(quoted(key))
        infos = [self.tensor_info(i) for i in range(num_tensors)]
        tensors = self.place(infos, self.alignment(metadata))
        return Header(metadata=metadata, tensors=tensors)

    def tensor_info(self, index: int) -> TensorRecord:
        name = self.name(f"name of tensor {index}")
        shown = quoted(name)
        dimensions = self.u32(f"dimension count of {shown}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.fail(
                f"tensor {shown} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are legal"
            )
        sizes = struct.unpack(f"<{dimensions}Q", self.bytes(8 * dimensions, f"shape of {shown}"))
        number = self.u32(f"type of {shown}")
        offset = self.u64(f"offset of {shown}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self.fail(f"tensor {shown} has the unknown type number {number}")
        shape = sizes[::-1]
        if 0 in shape:
            self.fail(f"tensor {shown} has a dimension of zero: shape {shape}")
        block = GGML_QUANT_SIZES[kind][0]
        if shape[-1] % block:
            self.fail(
                f"tensor {shown} of type {kind.name} has rows of {shape[-1]},"
                f" not a multiple of the block of {block}"
            )
        return TensorRecord(name=name, shape=shape, type=kind, path=self.path, offset=offset)

    def alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int):
            self.fail(f"general.alignment has type {type(alignment).__name__}, not an integer")
        if alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment={alignment} must be a power of two")
        return alignment

    def place(self, infos: list[TensorRecord], alignment: int) -> dict[str, TensorRecord]:
        """Returns the tensors with offsets from the start of the file, all inside and apart."""
        start = -(-self.offset // alignment) * alignment
        tensors: dict[str, TensorRecord] = {}
        for info in infos:
            name, end = info.name, start + info.offset + info.nbytes
            if name in tensors:
                self.fail(f"duplicate tensor {quoted(name)}")
            if info.offset % alignment:
                self.fail(
                    f"tensor {quoted(name)}: {info.offset=} is not aligned to {alignment} bytes"
                )
            if end > self.size:
                self.fail(
                    f"truncated: tensor {quoted(name)} of shape {info.shape} ({info.nbytes} bytes"
                    f" at offset {info.offset}) ends at {end}, beyond the file's size {self.size}"
                )
            tensors[name] = dataclasses.replace(info, offset=start + info.offset)
        ordered = sorted(tensors.values(), key=lambda record: record.offset)
        for before, after in zip(ordered, ordered[1:], strict=False):
            if before.offset + before.nbytes > after.offset:
                self.fail(
                    f"tensors {quoted(before.name)} and {quoted(after.name)} overlap"
                    f" at byte {after.offset}"
                )
        return tensors
