"""Compiles every kernel to machine code for a described H200, on a host that has none.

Needs, beside JAX, its CUDA plugin (`jax-cuda12-plugin` and `jax-cuda12-pjrt`, or 13) and a `ptxas`
on PATH or in the package `nvidia-cuda-nvcc-cu12`. `python -m bench.compile_kernels` prints
registers, spills, shared memory and compile time of each; it does not say whether a kernel is
right or fast.
"""

import dataclasses
import os
import pathlib
import re
import tempfile
import time

# Read when the plugin is loaded, so set before JAX is imported.
_DUMP = pathlib.Path(tempfile.mkdtemp(prefix="ptxas-"))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(_DUMP)}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from bench.kernels import CASES, Case  # noqa: E402
from openjet_jax.described import card_of, sharding_on  # noqa: E402
from pallas_kernels.decode_activations import Activations, prepare  # noqa: E402
from pallas_kernels.decode_blocks import BLOCKS  # noqa: E402
from pallas_kernels.decode_cuts import Tiles, default_tiles  # noqa: E402
from pallas_kernels.decode_product import decode_product  # noqa: E402


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler says of one kernel."""

    name: str
    seconds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_product(case: Case, sharding, tiles: Tiles | None = None) -> Report:
    """Returns the report of one decode product, by default with its default cut."""
    block = BLOCKS[case.block]
    tiles = tiles or default_tiles(block, case.outputs, case.k, case.rows)

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x = jax.ShapeDtypeStruct((case.rows, case.k), jnp.float32)
    prepared = jax.eval_shape(lambda x: prepare(x, block), x)
    operands = jax.tree.map(lambda leaf: spec(leaf.shape, leaf.dtype), prepared)
    words = case.k // 256 * block.words

    def product(operand: Activations, weights, layer):
        return decode_product(operand, weights, layer, block, tiles, case.epilogue)

    weights, layer = spec((2, case.outputs // 16, words), jnp.uint32), spec((1,), jnp.int32)
    for old in _DUMP.iterdir():
        old.unlink()
    start = time.monotonic()
    program = jax.jit(product, out_shardings=sharding)
    program.trace(operands, weights, layer).lower().compile()
    seconds = time.monotonic() - start
    (text,) = (path.read_text() for path in _DUMP.glob("*.ptxas"))
    (resources,) = (path.read_text() for path in _DUMP.glob("*.resources*"))
    return Report(
        name=case.name,
        seconds=seconds,
        registers=_number(r"Used (\d+) registers", text),
        spilled_bytes=_number(r"(\d+) bytes spill stores", text),
        shared_bytes=_number(r"smem_scratch_bytes=(\d+)", resources),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r}: {text[:500]}")
    return int(match.group(1))


def main() -> None:
    """Prints a line for every kernel."""
    sharding = sharding_on(card_of("h200"))
    for case in CASES:
        report = compile_product(case, sharding)
        print(
            f"{report.name:20} {report.registers:3} registers, {report.spilled_bytes} bytes"
            f" spilled, {report.shared_bytes:6} bytes shared, {report.seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
