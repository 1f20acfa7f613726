"""Which packed format holds a ggml type exactly, and repacking of its blocks into planes.

No value is rounded: unpacked planes are bit for bit what `gguf.quants` dequantises from the same
bytes. Types without an exact packed form are refused by name.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from openjet_jax.convert import blocks as block
from openjet_jax.convert import grid_blocks as grid
from openjet_jax.convert.blocks import BlockParts, Blocks
from pallas_kernels.formats import FORMATS

_SLAB_WEIGHTS = 2**18
"""Decoded at once: codes and temporaries stay in a core's second-level cache."""

_EXPONENTS = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
}
"""The exponent bits, all ones in NaN and infinity."""


class UnsupportedTypeError(ValueError):
    """A tensor has a ggml type whose values no packed format holds exactly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Where a ggml type goes: the packed format's name, and blocks to that format's parts."""

    packed: str
    decode: Callable[[Blocks], BlockParts]


BLOCK_FORMATS: dict[int, BlockFormat] = {
    int(ggml_type): BlockFormat(packed=packed, decode=decode)
    for ggml_type, packed, decode in (
        (Type.F32, "f32", block.f32),
        (Type.F16, "f16", block.f16),
        (Type.BF16, "bf16", block.bf16),
        (Type.Q8_0, "q8_0", block.q8_0),
        (Type.Q5_0, "q8_0", block.q5_0),
        (Type.Q5_1, "q5_1", block.q5_1),
        (Type.Q4_0, "q4_0", block.q4_0),
        (Type.Q4_1, "q4_1", block.q4_1),
        (Type.Q6_K, "q6_k", block.q6_k),
        (Type.Q5_K, "q5_k", block.q5_k),
        (Type.Q4_K, "q4_k", block.q4_k),
        (Type.Q3_K, "q3_k", block.q3_k),
        (Type.Q2_K, "q2_k", block.q2_k),
        (Type.IQ4_NL, "iq4_nl", block.q4_0),
        (Type.IQ4_XS, "iq4_xs", block.iq4_xs),
        (Type.TQ1_0, "q4_0", block.tq1_0),
        (Type.TQ2_0, "q4_0", block.tq2_0),
        (Type.IQ3_S, "iq3_s", grid.iq3_s),
        (Type.IQ3_XXS, "iq3_xxs", grid.iq3_xxs),
        (Type.IQ2_XXS, "iq2", grid.iq2_xxs),
        (Type.IQ2_XS, "iq2", grid.iq2_xs),
        (Type.IQ2_S, "iq2", grid.iq2_s),
        (Type.IQ1_S, "iq1", grid.iq1_s),
        (Type.IQ1_M, "iq1", grid.iq1_m),
        (Type.MXFP4, "mxfp4", grid.mxfp4),
        (Type.NVFP4, "nvfp4", grid.nvfp4),
    )
}
"""Every supported ggml type by number."""


def packed_format_of(ggml_type: int) -> str | None:
    """Returns the name of the packed format that holds a ggml type exactly, None if none does."""
    block_format = BLOCK_FORMATS.get(ggml_type)
    return None if block_format is None else block_format.packed


def repack(blocks: np.ndarray, ggml_type: int) -> tuple[str, dict[str, np.ndarray]]:
    """Returns (packed format name, planes) of one matrix, values unchanged.

    Rows are independent: to bound memory further, call this for some rows at a time. Beyond its
    result it needs about 10 MB (and a row).

    Args:
      blocks: uint8 [rows, bytes per row], a memory map being welcome; F32 and F16 may be typed.
      ggml_type: the number of the blocks' type.

    Raises:
      UnsupportedTypeError: no packed format holds the type exactly.
      ValueError: rows are not whole blocks, or a scale or dense value is NaN or infinite.
    """
    if (block_format := BLOCK_FORMATS.get(ggml_type)) is None:
        raise UnsupportedTypeError(_refusal(ggml_type))
    _, block_bytes = GGML_QUANT_SIZES[Type(ggml_type)]
    blocks = blocks.view(np.uint8)
    rows, row_bytes = blocks.shape
    if row_bytes % block_bytes:
        raise ValueError(
            f"a row of {row_bytes} bytes is not a whole number of {Type(ggml_type).name} blocks "
            f"of {block_bytes} bytes; the file is damaged or mislabelled"
        )
    k = row_bytes // block_bytes * GGML_QUANT_SIZES[Type(ggml_type)][0]
    layout = FORMATS[block_format.packed]
    specs = layout.plane_specs(rows, k)
    planes = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
    step = max(1, _SLAB_WEIGHTS // k)
    for start in range(0, rows, step):
        slab = blocks[start : start + step]
        parts = block_format.decode(slab.reshape(-1, block_bytes))
        _check_finite(parts, Type(ggml_type).name)
        parts = {name: part.reshape(len(slab), -1) for name, part in parts.items()}
        for name, plane in layout.pack(parts).items():
            planes[name][start : start + step] = plane
    return layout.name, planes


def _check_finite(parts: BlockParts, type_name: str) -> None:
    """Raises ValueError if a float is NaN or infinite: so would be every weight it touches."""
    for name in parts.keys() & {"d", "dmin", "m", "values"}:
        exponent = _EXPONENTS[parts[name].dtype.name]
        bits = parts[name].view(exponent.dtype) & exponent
        if (bits == exponent).any():
            raise ValueError(
                f"a {type_name} block has a NaN or infinite {name!r}; the file is damaged or was "
                "made from broken weights"
            )


def _refusal(ggml_type: int) -> str:
    names = [Type(number).name for number in BLOCK_FORMATS]
    known = ggml_type in set(Type)
    name = Type(ggml_type).name if known else "unknown"
    return (
        f"ggml type {int(ggml_type)} ({name}) cannot be packed exactly; re-quantise the file with "
        f"llama-quantize to one of {', '.join(names)}"
    )
