"""Opens a GGUF model: one file, or all parts of a split one, as metadata and mapped tensors.

The types, their block sizes and the container's constants are the `gguf` package's, and so is the
arithmetic that conversion is checked against. Its reader is not used: on a vocabulary of 248,320
tokens it takes 20 s and 800 MiB where `read_header` takes 0.3 s and 50 MiB, and it loops, recurses
or wraps on false counts and offsets. This file knows no architecture.
"""

import dataclasses
import os
import re
from pathlib import Path

from openjet_jax.convert.gguf_header import (
    GGUFError,
    Header,
    TensorRecord,
    Value,
    quoted,
    read_header,
)

__all__ = ["GGUFError", "GGUFFile", "TensorRecord", "Value", "open_gguf", "quoted"]

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GGUFFile:
    """An open container; a split file counts as one.

    Attributes:
      path: the file that was asked for.
      parts: all files, in order; one unless the file is split.
      metadata: the keys of the first part.
      tensors: the records of all parts by name, in file order.
    """

    path: Path
    parts: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, TensorRecord]


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Returns the checked header of a GGUF file, following the parts of a split one.

    Args:
      path: the file, or any part NAME-00001-of-0000N.gguf of a split file. A file that holds only
        a vocabulary opens too.

    Raises:
      GGUFError: the content is not a sound container, or a part of a split file is missing.
      OSError: the system cannot open the file that was asked for.
    """
    path = Path(path)
    header = read_header(path)
    count = _split_key(path, header, "split.count", 1)
    if count <= 1:
        return GGUFFile(path=path, parts=(path,), metadata=header.metadata, tensors=header.tensors)
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise GGUFError(
            f"{path}: split.count={count}, but the name does not end in -0000I-of-{count:05d}.gguf;"
            " restore the name that the file was split under"
        )
    paths = tuple(
        path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)
    )
    for other in paths:
        if not other.is_file():
            raise GGUFError(f"{path}: {other.name}, a part of this split file, is missing")
    headers = {other: header if other == path else read_header(other) for other in paths}
    return GGUFFile(
        path=path,
        parts=paths,
        metadata=headers[paths[0]].metadata,
        tensors=_join_tensors(headers),
    )


def _join_tensors(headers: dict[Path, Header]) -> dict[str, TensorRecord]:
    """Returns the tensors of all parts, which must agree on their number, order and contents."""
    tensors: dict[str, TensorRecord] = {}
    for i, (path, header) in enumerate(headers.items()):
        for key, expected in (("split.no", i), ("split.count", len(headers))):
            if (found := _split_key(path, header, key, -1)) != expected:
                raise GGUFError(f"{path}: {key}={found}, but this part's name says {expected}")
        for name, record in header.tensors.items():
            if name in tensors:
                other = tensors[name].path.name
                raise GGUFError(f"{path}: duplicate tensor {quoted(name)}: {other} has it too")
            tensors[name] = record
    first, header = next(iter(headers.items()))
    promised = _split_key(first, header, "split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise GGUFError(
            f"{first}: split.tensors.count={promised}, but the {len(headers)} parts hold"
            f" {len(tensors)} tensors"
        )
    return tensors


def _split_key(path: Path, header: Header, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise GGUFError(f"{path}: {key}={quoted(value)} has the wrong type: it must be an integer")
    return value
