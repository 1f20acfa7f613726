"""All packed formats by name."""

from pallas_kernels import (
    matmul_dense,
    matmul_q2,
    matmul_q4,
    matmul_q5,
    matmul_q6,
    matmul_q8,
    matmul_t4,
)
from pallas_kernels.packed import PackedFormat

_ALL: tuple[PackedFormat, ...] = (
    matmul_dense.F32,
    matmul_dense.F16,
    matmul_dense.BF16,
    matmul_q8.Q8_0,
    matmul_q6.Q6_K,
    matmul_q5.Q5_K,
    matmul_q5.Q5_1,
    matmul_q4.Q4_K,
    matmul_q4.Q4_1,
    matmul_q2.Q2_K,
    matmul_t4.Q4_0,
    matmul_t4.Q3_K,
    matmul_t4.IQ4_NL,
    matmul_t4.IQ4_XS,
    matmul_t4.IQ3_S,
    matmul_t4.IQ3_XXS,
    matmul_t4.IQ2,
    matmul_t4.IQ1,
    matmul_t4.MXFP4,
    matmul_t4.NVFP4,
)

FORMATS: dict[str, PackedFormat] = {layout.name: layout for layout in _ALL}
"""Packed formats by the name that checkpoints use."""
