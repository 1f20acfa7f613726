"""Which kernels other GPUs than sm_90 take: compiled for them, and the others refused."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from openjet_jax.described import can_compile

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from bench.attention import chunk_operands  # noqa: E402
from bench.attention import operands as attention_operands  # noqa: E402
from bench.deltanet import GDN_SIZES, gdn_operands  # noqa: E402
from pallas_kernels import ptx  # noqa: E402
from pallas_kernels.attention_chunks import ROWS, Cut, merge  # noqa: E402
from pallas_kernels.attention_decode import attn_decode  # noqa: E402
from pallas_kernels.attention_inputs import attn_inputs  # noqa: E402
from pallas_kernels.attention_panels import WIDTH  # noqa: E402
from pallas_kernels.attention_prefill import attn_prefill  # noqa: E402
from pallas_kernels.cached_rows import empty  # noqa: E402
from pallas_kernels.decode_activations import prepare  # noqa: E402
from pallas_kernels.decode_blocks import BLOCKS  # noqa: E402
from pallas_kernels.decode_cuts import default_tiles  # noqa: E402
from pallas_kernels.decode_inputs import decode_inputs  # noqa: E402
from pallas_kernels.decode_product import decode_product  # noqa: E402
from pallas_kernels.deltanet_chunks import Plan  # noqa: E402
from pallas_kernels.deltanet_decode import Columns, gdn_decode  # noqa: E402
from pallas_kernels.deltanet_prefill import gdn_prefill  # noqa: E402
from pallas_kernels.deltanet_rows import gated_rows, prepared_rows  # noqa: E402
from pallas_kernels.prefill_inputs import prefill_inputs  # noqa: E402
from pallas_kernels.prefill_product import prefill_activations, prefill_product  # noqa: E402

BEFORE = ["8.0", "8.6", "8.9"]
BLOCK, SIZES = BLOCKS["q4_k"], GDN_SIZES[0]


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def words(outputs: int, k: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, outputs // 16, k // 256 * BLOCK.words), jnp.uint32)


def attention_inputs() -> tuple[Callable, Any]:
    cache = jax.eval_shape(lambda: (empty((2, 1024, 2, WIDTH), "bfloat16"),) * 2)
    projected = [floats(ROWS, width * WIDTH) for width in (16, 2, 2)]
    rest = [floats(2, WIDTH)] * 2, [floats(ROWS, 32)] * 2, cache, whole(), whole(ROWS)
    run = functools.partial(attn_inputs, heads=8, first=(0, 0, 0), eps=1e-6)
    return run, (projected, *rest)


def merged() -> tuple[Callable, Any]:
    cut = Cut(heads=8, kv_heads=2, capacity=1024)
    shape = cut.chunks, 8, ROWS
    operands = floats(*shape, WIDTH), floats(*shape, 2), floats(ROWS, 8, WIDTH), whole(ROWS)
    return functools.partial(merge, cut, gate_columns=None), operands


def rows_of_deltanet(kernel: Callable) -> tuple[Callable, Any]:
    x, parameters, memory = jax.eval_shape(lambda: gdn_operands(SIZES, 2, jax.random.key(0), 64))
    pending_rows = memory.pending.k.shape[1]
    columns = Columns.of(x, (0, 0, 0, 0))
    plan = Plan(sizes=SIZES, rows=64, pending_rows=pending_rows, columns=columns)
    if kernel is gated_rows:
        return functools.partial(kernel, plan), (x.z, x.z, parameters.norm, whole(1))
    history = floats(SIZES.history, SIZES.channels)
    operands = x.u, history, parameters.conv, memory.pending, (whole(1),) * 3
    return functools.partial(kernel, plan), operands


def deltanet(kernel: Callable, rows: int) -> tuple[Callable, Any]:
    specs = jax.eval_shape(lambda: gdn_operands(SIZES, 2, jax.random.key(0), rows))
    return lambda *operands: kernel(*operands, SIZES), (*specs, *(whole(),) * 4)


def attention() -> tuple[Callable, Any]:
    q, k, v, gate, rows, end = jax.eval_shape(lambda: attention_operands(64, 2, "bfloat16", 8, 2))
    return attn_decode, (q, k, v, end, rows, end, gate)


def attention_of_a_chunk() -> tuple[Callable, Any]:
    operands = jax.eval_shape(lambda: chunk_operands(64, 64, 2, "bfloat16", 8, 2))
    q, k, v, gate, start, end = operands
    return attn_prefill, (q, k, v, end, start, end, gate)


def product() -> tuple[Callable, Any]:
    x = jax.eval_shape(functools.partial(prepare, block=BLOCK), floats(8, 512))
    tiles = default_tiles(BLOCK, 64, 512, 8)
    return lambda *operands: decode_product(*operands, BLOCK, tiles), (x, words(64, 512), whole(1))


def product_of_a_chunk() -> tuple[Callable, Any]:
    x = jax.eval_shape(prefill_activations, floats(64, 512))
    return lambda *operands: prefill_product(*operands, BLOCK), (x, words(64, 512), whole(1))


PORTABLE: dict[str, Callable[[], tuple[Callable, Any]]] = {
    "decode_inputs": lambda: (lambda x: decode_inputs(x, BLOCK), (floats(8, 512),)),
    "prefill_inputs": lambda: (prefill_inputs, (floats(64, 512),)),
    "attn_inputs": attention_inputs,
    "attn_decode_merge": merged,
    "gdn_prefill_rows": lambda: rows_of_deltanet(prepared_rows),
    "gdn_prefill_norm": lambda: rows_of_deltanet(gated_rows),
}
"""By the name of the kernel: a function that launches it, and its operands."""

SM_90_ALONE: dict[str, Callable[[], tuple[Callable, Any]]] = {
    "decode_product_q4_k": product,
    "prefill_product_q4_k": product_of_a_chunk,
    "attn_decode": attention,
    "attn_prefill": attention_of_a_chunk,
    "gdn_decode": lambda: deltanet(gdn_decode, ROWS),
    "gdn_prefill_mix": lambda: deltanet(gdn_prefill, 64),
}
"""The same of kernels that need sm_90: the first one that is refused."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU that is not here, as Mosaic asks for it."""

    compute_capability: str
    device_kind: str = "a GPU"
    num_cores: int = 100
    platform: str = "cuda"


def traced_for(capability: str, kernel: tuple[Callable, Any]) -> str:
    """Returns the program of a kernel, lowered for an absent GPU."""
    run, operands = kernel
    device: Any = Device(capability)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda *operands: run(*operands)).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", PORTABLE)
def test_a_portable_kernel_waits_for_none_before_it_on_a_gpu_that_cannot(name):
    waits = "griddepcontrol" in traced_for("9.0", PORTABLE[name]())
    assert waits == (name != "prefill_inputs")
    for capability in BEFORE:
        text = traced_for(capability, PORTABLE[name]())
        assert f"{name}_kernel" in text and "griddepcontrol" not in text


@pytest.mark.parametrize("capability", [*BEFORE, "10.0", "12.0"])
@pytest.mark.parametrize("name", SM_90_ALONE)
def test_a_kernel_of_sm_90_is_refused_by_name_on_another_gpu(name, capability):
    message = f"{name}_kernel needs compute capability 9.0, not {capability}; use the reference"
    with pytest.raises(ValueError, match=re.escape(message)):
        traced_for(capability, SM_90_ALONE[name]())


def test_a_gpu_without_their_instructions_is_refused_portable_kernels_too():
    with pytest.raises(ValueError, match="needs compute capability 8.0 or later, not 7.5"):
        traced_for("7.5", PORTABLE["decode_inputs"]())


def test_kernels_are_for_sm_90_where_there_is_no_gpu():
    if jax.default_backend() == "cpu":
        assert ptx.capability() == (9, 0)


@pytest.mark.parametrize("capability", BEFORE)
def test_portable_kernels_compile_to_machine_code_without_spills(capability):
    """In a process of its own: one process can compile for one target."""
    if not can_compile():
        pytest.skip("needs JAX's CUDA plugin and ptxas")
    done = subprocess.run(
        [sys.executable, "-m", "bench.compile_kernels", "--capability", capability],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    target = f"sm_{capability.replace('.', '')}"
    lines = [line for line in done.stdout.splitlines() if "registers" in line]
    assert lines and all(f"{target}: " in line for line in lines)
    assert all(", 0 bytes spilled" in line for line in lines)
    for name in ("inputs_us", "prefill_inputs", "attn_inputs", *list(PORTABLE)[3:]):
        assert any(line.startswith(name) for line in lines)
