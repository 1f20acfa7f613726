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

from bench.attention import operands as attention_operands  # noqa: E402
from bench.deltanet import GDN_SIZES, gdn_operands  # noqa: E402
from bench.kernels import CASES, Case  # noqa: E402
from openjet_jax.described import card_of, sharding_on  # noqa: E402
from pallas_kernels.attention_decode import attn_decode  # noqa: E402
from pallas_kernels.decode_activations import Activations, prepare  # noqa: E402
from pallas_kernels.decode_blocks import BLOCKS  # noqa: E402
from pallas_kernels.decode_cuts import Tiles, default_tiles  # noqa: E402
from pallas_kernels.decode_product import decode_product  # noqa: E402
from pallas_kernels.deltanet_decode import Tiles as GdnTiles  # noqa: E402
from pallas_kernels.deltanet_decode import gdn_decode  # noqa: E402
from pallas_kernels.deltanet_layer import Sizes  # noqa: E402

ATTENTION_HEADS = [(8, 2), (16, 4), (24, 4)]
"""Query and KV heads of the 0.8B and 2B, the 4B and 9B, and the 27B model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler says of one kernel, and what its program keeps beside its operands."""

    name: str
    seconds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    copied_bytes: int


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
    return _compiled(case.name, product, (operands, weights, layer), sharding)


def compile_gdn_decode(sizes: Sizes, sharding, tiles: GdnTiles | None = None) -> Report:
    """Returns the report of a DeltaNet layer's decode kernel."""
    specs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: gdn_operands(sizes, layers=2, key=jax.random.key(0))),
    )

    def layer(x, parameters, memory, count):
        return gdn_decode(
            x, parameters, memory, count, count, count, count, sizes, tiles or GdnTiles()
        )

    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    name = f"gdn_decode_{sizes.key_heads}_{sizes.value_heads}"
    return _compiled(name, layer, (*specs, count), sharding, donated=2)


def compile_attn_decode(heads: int, kv_heads: int, kind: str, sharding) -> list[Report]:
    """Returns the reports of the two kernels of a cycle's attention over a cache of one format."""
    q, k, v, gate, positions, end = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: attention_operands(1024, 2, kind, heads, kv_heads)),
    )
    return _reports(attn_decode, (q, k, v, end, positions, end, gate), sharding)


def _compiled(name: str, run, operands, sharding, donated: int | None = None) -> Report:
    (report,) = _reports(run, operands, sharding, donated)
    return dataclasses.replace(report, name=name)


def _reports(run, operands, sharding, donated: int | None = None) -> list[Report]:
    """Returns a report for each kernel of a program."""
    for old in _DUMP.iterdir():
        old.unlink()
    start = time.monotonic()
    program = jax.jit(run, out_shardings=sharding, donate_argnums=donated)
    compiled = program.trace(*operands).lower().compile()
    seconds, reports, memory = time.monotonic() - start, [], compiled.memory_analysis()
    assert memory is not None
    for path in sorted(_DUMP.glob("*.ptxas")):
        text = path.read_text()
        resources = path.with_suffix(".resources.txt").read_text()
        reports.append(
            Report(
                name=path.stem,
                seconds=seconds,
                registers=_number(r"Used (\d+) registers", text),
                spilled_bytes=_number(r"(\d+) bytes spill stores", text),
                shared_bytes=_number(r"smem_scratch_bytes=(\d+)", resources),
                copied_bytes=memory.temp_size_in_bytes,
            )
        )
    return reports


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r}: {text[:500]}")
    return int(match.group(1))


def main() -> None:
    """Prints a line for every kernel."""
    sharding = sharding_on(card_of("h200"))
    for case in CASES:
        _print([compile_product(case, sharding)])
    for sizes in GDN_SIZES:
        _print([compile_gdn_decode(sizes, sharding)])
    for heads, kv_heads in ATTENTION_HEADS:
        for kind in ("bfloat16", "q8_0"):
            _print(compile_attn_decode(heads, kv_heads, kind, sharding))


def _print(reports: list[Report]) -> None:
    for report in reports:
        print(
            f"{report.name:26} {report.registers:3} registers, {report.spilled_bytes} bytes"
            f" spilled, {report.shared_bytes:6} bytes shared, {report.seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
