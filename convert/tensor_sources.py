"""Holds a file's tensors against the names a model should have: one source for each weight leaf."""

import dataclasses
import math

import numpy as np
from gguf.constants import GGMLQuantizationType

from openjet_jax.config import ModelConfig
from openjet_jax.convert.architectures import LAYOUTS, expected_tensors
from openjet_jax.convert.block_formats import packed_format_of
from openjet_jax.convert.gguf import GGUFError, GGUFFile, TensorRecord, quoted
from openjet_jax.convert.tensor_names import ExpectedPart, ExpectedTensor, Role

FLOAT_TYPES = frozenset(
    {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
)
"""Types of norms, convolution taps, decays and biases, which stay plain floats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSource:
    """One leaf of the weights and where its values come from.

    Attributes:
      name: of the tensor in the file.
      record: of that tensor.
      rows: the rows of each group that belong to this role; None for all of them.
      groups: equal groups that the tensor's rows fall into.
      shape: NumPy shape of those rows: (rows, k), or (n,) of a vector.
      role: where it goes.
    """

    name: str
    record: TensorRecord
    rows: slice | None
    groups: int
    shape: tuple[int, ...]
    role: Role

    @property
    def nbytes(self) -> int:
        """Bytes of these rows in the file."""
        rows = self.record.rows
        if self.rows is not None:
            rows = self.groups * (self.rows.stop - self.rows.start)
        return rows * self.record.row_bytes

    @property
    def data(self) -> np.ndarray:
        """These rows, uint8 [rows, bytes per row]: a read-only map, a copy if there are groups."""
        data = self.record.data
        if self.rows is None:
            return data
        if self.groups == 1:
            return data[self.rows]
        grouped = data.reshape(self.groups, -1, data.shape[-1])
        return grouped[:, self.rows].reshape(-1, data.shape[-1])


def match_tensors(
    file: GGUFFile, config: ModelConfig, disregarded_block: int | None = None
) -> tuple[TensorSource, ...]:
    """Returns one source for each leaf of the weights, in the order of `expected_tensors`.

    A tensor may give several sources: q, k and v fused in one, gates and ups of experts in another.
    An MTP block without a final norm of its own gives `output_norm` a second time.
    A tied head and the shared embedding and head of the MTP block give none.

    Args:
      file: the container.
      config: what its keys say.
      disregarded_block: a block whose tensors are not looked at (an incomplete MTP block).

    Raises:
      GGUFError: a tensor is missing, has another shape or type, or has no place in the model.
    """
    unused = LAYOUTS[config.architecture].disregarded_tensors(config)
    left = {name: record for name, record in file.tensors.items() if name not in unused}
    sources: list[TensorSource] = []
    missing: list[str] = []
    for tensor in expected_tensors(config):
        part = tensor.part
        if part is not None and tensor.name not in file.tensors and part.name in file.tensors:
            left.pop(part.name, None)
            sources.append(_part_source(file, tensor, part))
        elif record := left.pop(tensor.name, None) or file.tensors.get(tensor.fallback):
            shape = tensor.also if record.shape == tensor.also else tensor.shape
            _check(file, record, shape, tensor.role)
            sources.append(_source(record, tensor))
        elif not tensor.optional:
            missing.append(tensor.name)
    if missing:
        raise GGUFError(f"{file.path}: missing {_listing(missing)}")
    if disregarded_block is not None:
        prefix = f"blk.{disregarded_block}."
        left = {name: record for name, record in left.items() if not name.startswith(prefix)}
    if left:
        scales = all(name.endswith((".scale", ".input_scale")) for name in left)
        hint = "; NVFP4 scales are not supported" if scales else ""
        raise GGUFError(f"{file.path}: unexpected {_listing(list(left))}{hint}")
    return tuple(sources)


def _listing(names: list[str], most: int = 4) -> str:
    shown = ", ".join(quoted(name) for name in names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _part_source(file: GGUFFile, tensor: ExpectedTensor, part: ExpectedPart) -> TensorSource:
    """Returns some rows of every group of a larger tensor; a group is an expert, or all of it."""
    record = file.tensors[part.name]
    _check(file, record, part.shape, tensor.role)
    rows = slice(part.start, part.start + tensor.shape[-2])
    return _source(record, tensor, rows, groups=math.prod(part.shape[:-2]))


def _source(
    record: TensorRecord, tensor: ExpectedTensor, rows: slice | None = None, groups: int = 1
) -> TensorSource:
    return TensorSource(
        name=record.name,
        record=record,
        rows=rows,
        groups=groups,
        shape=tensor.flat_shape,
        role=tensor.role,
    )


def _check(file: GGUFFile, record: TensorRecord, shape: tuple[int, ...], role: Role) -> None:
    packed = role.kind != "dense"
    if _without_leading_ones(record.shape) != _without_leading_ones(shape):
        raise GGUFError(
            f"{file.path}: tensor {quoted(record.name)} has shape {record.shape}, expected {shape}"
            " from the sizes in the metadata (embedding_length, head counts and so on)"
        )
    if packed and packed_format_of(record.type) is None:
        raise GGUFError(
            f"{file.path}: tensor {quoted(record.name)} has type {record.type.name}, which no"
            " packed format holds; re-quantise the file with llama-quantize"
        )
    if not packed and record.type not in FLOAT_TYPES:
        raise GGUFError(
            f"{file.path}: tensor {quoted(record.name)} has type {record.type.name}; it must be"
            " F32, F16 or BF16"
        )


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape as ggml compares it: outer axes of length one do not count."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
