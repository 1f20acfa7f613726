"""Compiles every kernel to machine code for a described H200, on a host that has none.

Needs, beside JAX, its CUDA plugin (`jax-cuda12-plugin` and `jax-cuda12-pjrt`, or 13) and a `ptxas`
on PATH or in the package `nvidia-cuda-nvcc-cu12`. `python -m bench.compile_kernels` prints
registers, spills, shared memory and compile time of each; it does not say whether a kernel is
right or fast.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
import time

# Read when the plugin is loaded, so set before JAX is imported.
_DUMP = pathlib.Path(tempfile.mkdtemp(prefix="ptxas-"))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(_DUMP)}
if importlib.util.find_spec("nvidia") and (_spec := importlib.util.find_spec("nvidia.cuda_nvcc")):
    for _place in _spec.submodule_search_locations or []:
        os.environ["PATH"] += f"{os.pathsep}{_place}/bin"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from bench.kernels import CASES, Case  # noqa: E402
from pallas_kernels.decode_activations import Activations, prepare  # noqa: E402
from pallas_kernels.decode_blocks import BLOCKS  # noqa: E402
from pallas_kernels.decode_cuts import Tiles, default_tiles  # noqa: E402
from pallas_kernels.decode_product import decode_product  # noqa: E402

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler says of one kernel."""

    name: str
    seconds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int


def can_compile() -> bool:
    """Returns whether this host has the plugin and the assembler."""
    plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    found = importlib.util.find_spec("jax_plugins") is not None
    return (
        found
        and any(importlib.util.find_spec(plugin) for plugin in plugins)
        and shutil.which("ptxas") is not None
    )


def described_h200() -> jax.sharding.NamedSharding:
    """Returns a sharding on one absent H200."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=_H200
    )
    mesh = jax.sharding.Mesh(topology.devices, ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


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
    sharding = described_h200()
    for case in CASES:
        report = compile_product(case, sharding)
        print(
            f"{report.name:20} {report.registers:3} registers, {report.spilled_bytes} bytes"
            f" spilled, {report.shared_bytes:6} bytes shared, {report.seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
