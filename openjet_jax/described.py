"""GPUs that are not here, described well enough to plan for them and to compile for them."""

import dataclasses
import importlib.util
import os
import shutil
from typing import Any

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU.

    Attributes:
      name: as its driver calls it.
      capability: its compute capability.
      cores: multiprocessors.
      shared_bytes: shared memory that a kernel may ask for.
      cache_bytes: second-level cache.
      memory_bytes: what its driver counts in all.
      bandwidth: of that memory, bytes a second.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    shared_bytes: int
    cache_bytes: int
    memory_bytes: int
    bandwidth: int

    @property
    def backend(self) -> str:
        """What `load` takes there."""
        return "mosaic" if self.capability == (9, 0) else "reference"


CARDS = {
    "rtx3090": Card(
        name="NVIDIA GeForce RTX 3090",
        capability=(8, 6),
        cores=82,
        shared_bytes=101_376,
        cache_bytes=6_291_456,
        memory_bytes=25_430_000_000,
        bandwidth=936_000_000_000,
    ),
    "rtx4090": Card(
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        cores=128,
        shared_bytes=101_376,
        cache_bytes=75_497_472,
        memory_bytes=25_380_000_000,
        bandwidth=1_008_000_000_000,
    ),
    "h200": Card(
        name="NVIDIA H200",
        capability=(9, 0),
        cores=132,
        shared_bytes=232_448,
        cache_bytes=62_914_560,
        memory_bytes=150_754_820_096,
        bandwidth=4_800_000_000_000,
    ),
}
"""Cards by the name that a command line takes."""


def card_of(name: str) -> Card:
    """Returns a card.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in CARDS:
        raise ValueError(f"device={name!r} is not described; there are {', '.join(CARDS)}")
    return CARDS[name]


def can_compile() -> bool:
    """Returns whether this host has JAX's CUDA plugin and an assembler, put on PATH if need be.

    The assembler of the package `nvidia-cuda-nvcc-cu12` will do.
    """
    nvcc = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cuda_nvcc")
    for place in (nvcc and nvcc.submodule_search_locations) or []:
        if f"{place}/bin" not in os.environ["PATH"].split(os.pathsep):
            os.environ["PATH"] += f"{os.pathsep}{place}/bin"
    # Else the plugin asks a driver for its version, and there is none to ask.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    found = importlib.util.find_spec("jax_plugins") is not None
    plugin = found and any(importlib.util.find_spec(plugin) for plugin in PLUGINS)
    return bool(plugin) and shutil.which("ptxas") is not None


def sharding_on(card: Card) -> Any:
    """Returns a sharding on one absent card, for the arguments and results of programs.

    One process can compile for one compute capability.

    Raises:
      ValueError: this host lacks what compiling needs.
    """
    if not can_compile():
        raise ValueError(
            "compiling for an absent GPU needs JAX's CUDA plugin (jax-cuda12-plugin and "
            "jax-cuda12-pjrt) and ptxas (nvidia-cuda-nvcc-cu12); install them or leave that out"
        )
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="1x1x1",
        topology="1x1x1",
        target_config=_description(card),
    )
    mesh = jax.sharding.Mesh(topology.devices, ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _description(card: Card) -> str:
    """Returns what XLA wants to know, as the text of its protocol buffer."""
    major, minor = card.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {card.shared_bytes + 1024} threads_per_core_limit: 2048
  core_count: {card.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {card.bandwidth} l2_cache_size: {card.cache_bytes} clock_rate_ghz: 1.7
  device_memory_size: {card.memory_bytes} shared_memory_per_block_optin: {card.shared_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{card.name}"
"""
