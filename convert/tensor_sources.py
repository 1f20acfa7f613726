"""Holds a file's tensors against the names a model should have: one source for each weight leaf."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from gguf.constants import GGMLQuantizationType

from openjet_jax.config import ModelConfig
from openjet_jax.convert.block_formats import packed_format_of
from openjet_jax.convert.gguf import GGUFError, GGUFFile, TensorRecord, quoted
from openjet_jax.convert.tensor_names import (
    FUSED_FIELDS,
    FUSED_QKV,
    ExpectedTensor,
    Role,
    expected_tensors,
    sizes_of,
)

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
      rows: the rows that belong to this role; None for all of them.
      shape: NumPy shape of those rows: (rows, k), or (n,) of a vector.
      role: where it goes.
    """

    name: str
    record: TensorRecord
    rows: slice | None
    shape: tuple[int, ...]
    role: Role

    @property
    def nbytes(self) -> int:
        """Bytes of these rows in the file."""
        rows = self.rows.stop - self.rows.start if self.rows else self.record.rows
        return rows * self.record.row_bytes

    @property
    def data(self) -> np.ndarray:
        """A new read-only map uint8 [rows, bytes per row] of these rows."""
        return self.record.data[self.rows] if self.rows else self.record.data


def match_tensors(
    file: GGUFFile, config: ModelConfig, disregarded_block: int | None = None
) -> tuple[TensorSource, ...]:
    """Returns one source for each leaf of the weights, in the order of `expected_tensors`.

    An attention layer whose q, k and v are fused in `attn_qkv` gives three sources of one tensor.
    An MTP block without a final norm of its own gives `output_norm` a second time.
    A tied head and the shared embedding and head of the MTP block give none.

    Args:
      file: the container.
      config: what its keys say.
      disregarded_block: a block whose tensors are not looked at (an incomplete MTP block).

    Raises:
      GGUFError: a tensor is missing, has another shape or type, or has no place in the model.
    """
    left = dict(file.tensors)
    sources: list[TensorSource] = []
    missing: list[str] = []
    expected = expected_tensors(config)
    fused = _fused_layers(file, config)
    for tensor in expected:
        prefix = tensor.name.rpartition("attn_")[0]
        if prefix in fused and tensor.role.field in FUSED_FIELDS:
            left.pop(prefix + FUSED_QKV, None)
            sources.append(_fused_source(file, config, prefix, tensor))
        elif record := left.pop(tensor.name, None) or file.tensors.get(tensor.fallback):
            _check(file, record, tensor.shape, tensor.role.packed)
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


def _fused_layers(file: GGUFFile, config: ModelConfig) -> frozenset[str]:
    """Returns the prefixes of the attention blocks with one fused tensor in place of q, k and v."""

    def prefixes() -> Iterator[str]:
        layers = [*config.attention_layers, *([config.num_layers] if config.has_mtp else [])]
        for layer in layers:
            prefix = f"blk.{layer}."
            if prefix + FUSED_QKV in file.tensors and prefix + "attn_q.weight" not in file.tensors:
                yield prefix

    return frozenset(prefixes())


def _fused_source(
    file: GGUFFile, config: ModelConfig, prefix: str, tensor: ExpectedTensor
) -> TensorSource:
    """Returns the rows of q, k or v in a fused tensor with rows [q and gate per head | k | v]."""
    sizes = sizes_of(config)
    record = file.tensors[prefix + FUSED_QKV]
    counts = (sizes["query_gate"], sizes["kv"], sizes["kv"])
    _check(file, record, (sum(counts), config.hidden), packed=True)
    start = sum(counts[: FUSED_FIELDS.index(tensor.role.field)])
    return _source(record, tensor, slice(start, start + tensor.shape[0]))


def _source(
    record: TensorRecord, tensor: ExpectedTensor, rows: slice | None = None
) -> TensorSource:
    return TensorSource(
        name=record.name, record=record, rows=rows, shape=tensor.shape, role=tensor.role
    )


def _check(file: GGUFFile, record: TensorRecord, shape: tuple[int, ...], packed: bool) -> None:
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
