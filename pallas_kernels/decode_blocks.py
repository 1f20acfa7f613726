"""All kinds of block by the name of their format; `decode_words` says what a block is."""

from pallas_kernels.decode_k_blocks import HalfRunBlock, KBlock, Q2KBlock
from pallas_kernels.decode_run_blocks import ByteBlock, PairBlock
from pallas_kernels.decode_scales import ByteScales, FloatScales
from pallas_kernels.decode_signed_blocks import SignedBlock
from pallas_kernels.decode_words import Block
from pallas_kernels.matmul_q4 import Q4_1, Q4_K
from pallas_kernels.matmul_q5 import Q5_1, Q5_K
from pallas_kernels.matmul_q6 import Q6_K
from pallas_kernels.matmul_q8 import Q8_0
from pallas_kernels.matmul_t4 import (
    IQ1,
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q3_K,
    Q4_0,
)

_ALL: tuple[Block, ...] = (
    KBlock(Q4_K, 4),
    KBlock(Q5_K, 5),
    HalfRunBlock(Q6_K, 6),
    HalfRunBlock(Q3_K, 4),
    Q2KBlock(),
    ByteBlock(Q8_0, FloatScales(32)),
    ByteBlock(IQ4_NL, FloatScales(32), IQ4_NL.values),
    ByteBlock(IQ4_XS, ByteScales(32), IQ4_XS.values),
    PairBlock(Q4_0, 4, lanes=16, low=-8.0),
    PairBlock(Q4_1, 4, lanes=Q4_1.lanes),
    PairBlock(Q5_1, 5, lanes=Q5_1.lanes),
    SignedBlock(MXFP4, FloatScales(32, bfloat=True)),
    SignedBlock(NVFP4, FloatScales(16)),
    SignedBlock(IQ3_S, ByteScales(32)),
    SignedBlock(IQ3_XXS, ByteScales(32)),
    SignedBlock(IQ2, ByteScales(16)),
    SignedBlock(IQ1, ByteScales(16)),
)

BLOCKS: dict[str, Block] = {block.format.name: block for block in _ALL}
"""Blocks by the name of their format."""
