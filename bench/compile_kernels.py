"""Compiles every kernel to machine code for a described H200, on a host that has none.

Needs, beside JAX, its CUDA plugin (`jax-cuda12-plugin` and `jax-cuda12-pjrt`, or 13) and a `ptxas`
on PATH or in the package `nvidia-cuda-nvcc-cu12`. `python -m bench.compile_kernels` prints
registers, spills, shared memory and compile time of each; it does not say whether a kernel is
right or fast. `--capability 8.6` compiles for such a GPU instead, and only the kernels that are
portable (see `lane_kernel`).
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

# Read when the plugin is loaded, so set before JAX is imported.
_DUMP = pathlib.Path(tempfile.mkdtemp(prefix="ptxas-"))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(_DUMP)}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from bench.attention import chunk_operands  # noqa: E402
from bench.attention import operands as attention_operands  # noqa: E402
from bench.deltanet import GDN_SIZES, gdn_operands  # noqa: E402
from bench.head import CASES as HEAD_CASES  # noqa: E402
from bench.head import HeadCase, engine_tiles, head_operands, head_program  # noqa: E402
from bench.inputs import CASES as INPUTS_CASES  # noqa: E402
from bench.inputs import InputsCase, make_inputs, run_inputs  # noqa: E402
from bench.kernels import CASES, FORMAT_CASES, Case  # noqa: E402
from bench.prefill_products import CASES as PREFILL_CASES  # noqa: E402
from bench.prefill_products import PrefillCase, prefill_program  # noqa: E402
from openjet_jax.described import card_of, sharding_on  # noqa: E402
from pallas_kernels.attention_chunks import ROWS, Cut, merge  # noqa: E402
from pallas_kernels.attention_decode import attn_decode  # noqa: E402
from pallas_kernels.attention_inputs import attn_inputs  # noqa: E402
from pallas_kernels.attention_panels import WIDTH  # noqa: E402
from pallas_kernels.attention_prefill import attn_prefill  # noqa: E402
from pallas_kernels.cached_rows import empty  # noqa: E402
from pallas_kernels.decode_activations import Activations, prepare  # noqa: E402
from pallas_kernels.decode_blocks import BLOCKS  # noqa: E402
from pallas_kernels.decode_cuts import Tiles  # noqa: E402
from pallas_kernels.decode_product import decode_product  # noqa: E402
from pallas_kernels.deltanet_chunks import Plan as GdnPlan  # noqa: E402
from pallas_kernels.deltanet_decode import Columns, gdn_decode  # noqa: E402
from pallas_kernels.deltanet_decode import Tiles as GdnTiles  # noqa: E402
from pallas_kernels.deltanet_layer import Sizes  # noqa: E402
from pallas_kernels.deltanet_prefill import gdn_prefill  # noqa: E402
from pallas_kernels.deltanet_rows import gated_rows, prepared_rows  # noqa: E402
from pallas_kernels.prefill_inputs import prefill_inputs  # noqa: E402
from pallas_kernels.prefill_product import prefill_activations  # noqa: E402
from pallas_kernels.tile_choice import tiles_for  # noqa: E402

ATTENTION_HEADS = [(8, 2), (16, 4), (24, 4)]
"""Query and KV heads of the 0.8B and 2B, the 4B and 9B, and the 27B model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler says of one kernel, and what its program keeps beside its operands.

    Attributes:
      name: of the case.
      target: that the machine code is for, such as sm_90a.
      seconds: to compile it.
      registers: of a thread.
      spilled_bytes: that a thread stores for want of registers.
      shared_bytes: shared memory of a block of threads.
      copied_bytes: temporaries of the program, such as copies of operands.
      serialised: whether tensor core instructions wait for one another, which halves their rate.
    """

    name: str
    target: str
    seconds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    copied_bytes: int
    serialised: bool


def compile_kernel(
    name: str, function: Callable, operands: Any, sharding, donated: int | None = None
) -> Report:
    """Returns the report of a function that holds one kernel.

    Args:
      name: of the report.
      function: takes the operands.
      operands: a tuple of trees of arrays or their shapes.
      sharding: of one described card.
      donated: the operand whose memory the result takes over.
    """
    (report,) = compile_kernels(function, operands, sharding, donated)
    return dataclasses.replace(report, name=name)


def compile_kernels(
    function: Callable, operands: Any, sharding, donated: int | None = None
) -> list[Report]:
    """Returns a report for each kernel of a function; see `compile_kernel`."""

    def spec(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    for old in _DUMP.iterdir():
        old.unlink()
    start = time.monotonic()
    program = jax.jit(function, out_shardings=sharding, donate_argnums=donated)
    # Mosaic lowers for the default device, whatever the sharding says.
    with jax.default_device(sharding.mesh.devices.flat[0]):
        compiled = program.trace(*jax.tree.map(spec, operands)).lower().compile()
    seconds, reports, memory = time.monotonic() - start, [], compiled.memory_analysis()
    assert memory is not None
    for path in sorted(_DUMP.glob("*.ptxas")):
        text = path.read_text()
        resources = path.with_suffix(".resources.txt").read_text()
        reports.append(
            Report(
                name=path.stem,
                target=_found(r"for '(sm_\w+)'", text),
                seconds=seconds,
                registers=_number(r"Used (\d+) registers", text),
                spilled_bytes=_number(r"(\d+) bytes spill stores", text),
                shared_bytes=_number(r"smem_scratch_bytes=(\d+)", resources),
                copied_bytes=memory.temp_size_in_bytes,
                serialised="serialized" in text,
            )
        )
    return reports


def compile_product(case: Case, sharding, tiles: Tiles | None = None) -> Report:
    """Returns the report of one decode product, by default with the engine's cut."""
    block = BLOCKS[case.block]
    sizes = case.outputs, case.k, case.rows
    tiles = tiles or tiles_for(block, *sizes, case.epilogue, card_of("h200").name)
    x = jax.ShapeDtypeStruct((case.rows, case.k), jnp.float32)
    prepared = jax.eval_shape(lambda x: prepare(x, block), x)
    words = case.k // 256 * block.words
    weights = jax.ShapeDtypeStruct((2, case.outputs // 16, words), jnp.uint32)
    layer = jax.ShapeDtypeStruct((1,), jnp.int32)

    def product(operand: Activations, weights, layer):
        return decode_product(operand, weights, layer, block, tiles, case.epilogue)

    return compile_kernel(case.name, product, (prepared, weights, layer), sharding)


def compile_inputs(case: InputsCase, sharding) -> Report:
    """Returns the report of what comes before a product."""
    operands = jax.eval_shape(functools.partial(make_inputs, case))
    run = functools.partial(run_inputs, case)
    return compile_kernel(case.name, run, (operands,), sharding)


def compile_head(case: HeadCase, sharding) -> Report:
    """Returns the report of a head that chooses as it multiplies."""
    block = BLOCKS[case.block]
    x = jax.ShapeDtypeStruct((case.rows, case.k), jnp.float32)
    words = case.k // 256 * block.words
    operands = (
        jax.eval_shape(lambda x: prepare(x, block), x),
        jax.ShapeDtypeStruct((1, case.outputs // 16, words), jnp.uint32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.eval_shape(lambda: head_operands(case)),
    )
    program = head_program(case, engine_tiles(case, card_of("h200").name))
    return compile_kernel(case.name, program, operands, sharding)


def compile_prefill(case: PrefillCase, sharding) -> Report:
    """Returns the report of a product of many rows."""
    block = BLOCKS[case.block]
    x = jax.ShapeDtypeStruct((case.rows, case.k), jnp.float32)
    words = case.k // 256 * block.words
    operands = (
        jax.eval_shape(prefill_activations, x),
        jax.ShapeDtypeStruct((2, case.outputs // 16, words), jnp.uint32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    return compile_kernel(case.name, prefill_program(case), operands, sharding)


def compile_prefill_inputs(k: int, sharding) -> Report:
    """Returns the report of what comes before a product of 2,048 rows."""
    rows = jax.ShapeDtypeStruct((2048, k), jnp.float32)
    norm = jax.ShapeDtypeStruct((2, k), jnp.float32)
    layer = jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(x, added, norm, layer):
        return prefill_inputs(x, added=added, norm=norm, layer=layer, eps=1e-6)

    return compile_kernel(f"prefill_inputs_{k}", run, (rows, rows, norm, layer), sharding)


def compile_gdn_decode(sizes: Sizes, sharding, tiles: GdnTiles | None = None) -> Report:
    """Returns the report of a DeltaNet layer's decode kernel."""
    specs = jax.eval_shape(lambda: gdn_operands(sizes, layers=2, key=jax.random.key(0)))

    def layer(x, parameters, memory, count):
        return gdn_decode(
            x, parameters, memory, count, count, count, count, sizes, tiles or GdnTiles()
        )

    count = jax.ShapeDtypeStruct((), jnp.int32)
    name = f"gdn_decode_{sizes.key_heads}_{sizes.value_heads}"
    return compile_kernel(name, layer, (*specs, count), sharding, donated=2)


def compile_gdn_prefill(sizes: Sizes, sharding, rows: int = 2048) -> list[Report]:
    """Returns the reports of the kernels of a DeltaNet layer of a prompt."""
    specs = jax.eval_shape(lambda: gdn_operands(sizes, 2, jax.random.key(0), rows))

    def layer(x, parameters, memory, count):
        return gdn_prefill(x, parameters, memory, count, count, count, count, sizes)

    count = jax.ShapeDtypeStruct((), jnp.int32)
    reports = compile_kernels(layer, (*specs, count), sharding, donated=2)
    heads = f"{sizes.key_heads}_{sizes.value_heads}"
    return [
        dataclasses.replace(r, name=re.sub(r"_\d+$", "", r.name) + f"_{heads}") for r in reports
    ]


def compile_gdn_rows(sizes: Sizes, sharding, rows: int = 2048) -> list[Report]:
    """Returns the reports of the two of these kernels that take every row by itself."""
    x, parameters, memory = jax.eval_shape(lambda: gdn_operands(sizes, 2, jax.random.key(0), rows))
    plan = GdnPlan(
        sizes=sizes,
        rows=rows,
        pending_rows=memory.pending.k.shape[1],
        columns=Columns.of(x, (0, 0, 0, 0)),
    )
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    history = jax.ShapeDtypeStruct((sizes.history, sizes.channels), jnp.float32)
    before = x.u, history, parameters.conv, memory.pending, (count,) * 3
    after = x.z, x.z, parameters.norm, count
    first, last = (functools.partial(run, plan) for run in (prepared_rows, gated_rows))
    return [
        compile_kernel("gdn_prefill_rows", first, before, sharding),
        compile_kernel("gdn_prefill_norm", last, after, sharding),
    ]


def compile_merge(heads: int, kv_heads: int, sharding) -> Report:
    """Returns the report of the kernel that merges the chunks of a cycle's attention."""
    cut = Cut(heads=heads, kv_heads=kv_heads, capacity=4096)
    shape = cut.chunks, heads, ROWS
    operands = [
        jax.ShapeDtypeStruct(s, jnp.float32)
        for s in ((*shape, WIDTH), (*shape, 2), (ROWS, heads, WIDTH))
    ]
    counts = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    def run(sums, stats, gate, counts):
        return merge(cut, sums, stats, gate, counts, None)

    return compile_kernel("attn_decode_merge", run, (*operands, counts), sharding)


def compile_attn_decode(heads: int, kv_heads: int, kind: str, sharding) -> list[Report]:
    """Returns the reports of the two kernels of a cycle's attention over a cache of one format."""
    operands = jax.eval_shape(lambda: attention_operands(1024, 2, kind, heads, kv_heads))
    q, k, v, gate, positions, end = operands
    return compile_kernels(attn_decode, (q, k, v, end, positions, end, gate), sharding)


def compile_attn_inputs(heads: int, kv_heads: int, kind: str, sharding) -> Report:
    """Returns the report of the kernel before a cycle's attention."""

    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    width = 2 * heads * WIDTH, kv_heads * WIDTH, kv_heads * WIDTH
    projected, norms = [spec(ROWS, w) for w in width], [spec(2, WIDTH)] * 2
    cache = jax.eval_shape(lambda: (empty((2, 1024, kv_heads, WIDTH), kind),) * 2)
    counts = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    run = functools.partial(attn_inputs, heads=heads, first=(0, 0, 0), eps=1e-6)
    operands = projected, norms, [spec(ROWS, 32)] * 2, cache, *counts
    return compile_kernel(f"attn_inputs_{heads}_{kind}", run, operands, sharding, donated=3)


def compile_attn_prefill(heads: int, kv_heads: int, kind: str, sharding) -> Report:
    """Returns the report of a chunk's attention over a cache of one format."""
    operands = jax.eval_shape(lambda: chunk_operands(1024, 300, 2, kind, heads, kv_heads))
    q, k, v, gate, start, end = operands
    name = f"attn_prefill_{heads}_{kv_heads}_{kind}"
    return compile_kernel(name, attn_prefill, (q, k, v, end, start, end, gate), sharding)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r}: {text[:500]}")
    return match.group(1)


def _number(pattern: str, text: str) -> int:
    return int(_found(pattern, text))


def portable_reports(sharding) -> Iterator[Report]:
    """Yields the reports of all kernels that need no instruction of sm_90."""
    yield from (compile_inputs(case, sharding) for case in INPUTS_CASES)
    yield from (compile_prefill_inputs(k, sharding) for k in (5120, 17408))
    yield from (compile_attn_inputs(24, 4, kind, sharding) for kind in ("bfloat16", "q8_0"))
    yield compile_merge(24, 4, sharding)
    yield from compile_gdn_rows(GDN_SIZES[-1], sharding)


def all_reports(sharding) -> Iterator[Report]:
    """Yields the reports of all kernels."""
    products = itertools.chain(
        (compile_product(case, sharding) for case in CASES + FORMAT_CASES),
        (compile_inputs(case, sharding) for case in INPUTS_CASES),
        (compile_head(case, sharding) for case in HEAD_CASES),
        (compile_prefill(case, sharding) for case in PREFILL_CASES),
        (compile_prefill_inputs(k, sharding) for k in (5120, 17408)),
        (compile_gdn_decode(sizes, sharding) for sizes in GDN_SIZES),
    )
    prompts = (compile_gdn_prefill(sizes, sharding) for sizes in GDN_SIZES)
    attention = (
        compile_attn_decode(heads, kv_heads, kind, sharding)
        for heads, kv_heads in ATTENTION_HEADS
        for kind in ("bfloat16", "q8_0")
    )
    attention_inputs = (compile_attn_inputs(24, 4, kind, sharding) for kind in ("bfloat16", "q8_0"))
    chunks = (
        compile_attn_prefill(heads, kv_heads, kind, sharding)
        for heads, kv_heads in ATTENTION_HEADS
        for kind in ("bfloat16", "q8_0")
    )
    yield from itertools.chain(products, attention_inputs, *prompts, *attention, chunks)


def main() -> None:
    """Prints a line for every kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", default="9.0", help="of the GPU, such as 8.6")
    major, minor = map(int, parser.parse_args().capability.split("."))
    # One process compiles for one target.
    card = dataclasses.replace(card_of("h200"), capability=(major, minor))
    reports = all_reports if card.capability == (9, 0) else portable_reports
    for report in reports(sharding_on(card)):
        print(
            f"{report.name:26} {report.target}: {report.registers:3} registers,"
            f" {report.spilled_bytes} bytes spilled, {report.shared_bytes:6} bytes shared,"
            f" {report.seconds:.2f} s"
            f"{', wgmma serialised' if report.serialised else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
