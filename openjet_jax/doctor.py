"""What openjet-jax finds on this machine, what it will use and why, and what may get in the way.

Nothing here changes anything, and a part that cannot be read is left out rather than fatal: this
must answer on the very machines where the rest does not.
"""

import importlib.metadata
import io
import os
import pathlib
import platform
import shutil
import sys
from typing import Any

import jax
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

import openjet_jax
from openjet_jax.device_memory import host_memory
from openjet_jax.program_store import cache_directory
from openjet_jax.tiling import resolve_backend

PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tokenizers", "gguf")
GIB = 1 << 30
LITTLE_MEMORY, LITTLE_DISK = 4 * GIB, GIB
"""Below these, loading even a small model or keeping compiled programs may fail."""


def examine() -> dict[str, Any]:
    """Returns what was found, as JSON-ready values.

    Keys: `versions` (name to version), `python`, `machine`, `cores`, `memory` and `cache` (bytes),
    `devices` (one entry each), `backend` with its `why`, and `hazards`, a list of sentences that
    each end in the way out.
    """
    devices, hazards = _devices()
    cache = _cache()
    memory = host_memory()
    facts = {
        "versions": {"openjet-jax": openjet_jax.__version__}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": f"{platform.python_version()}, {sys.executable}",
        "machine": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "cache": cache,
        "devices": devices,
        "backend": _backend(devices),
    }
    return facts | {"hazards": hazards + _hazards(devices, memory, cache)}


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the devices JAX offers, and a hazard where it cannot offer any."""
    try:
        found = jax.devices()
    except RuntimeError as error:
        wanted = os.environ.get("JAX_PLATFORMS", "")
        return [], [
            f"JAX cannot start ({error}); JAX_PLATFORMS={wanted!r}: unset it to let JAX choose."
        ]
    devices = []
    for device in found:
        stats = device.memory_stats() or {}
        devices.append(
            {
                "platform": device.platform,
                "kind": device.device_kind,
                "compute_capability": getattr(device, "compute_capability", None),
                "memory": stats.get("bytes_limit"),
            }
        )
    return devices, []


def _backend(devices: list[dict[str, Any]]) -> dict[str, str]:
    """Returns what `load` takes on the first device, and why."""
    if not devices:
        return {"name": "none", "device": "no device", "why": "JAX offers none"}
    name = resolve_backend("auto")
    why = {
        "mosaic": "products and cycles go through kernels for sm_90, the rest through XLA",
        "reference": "plain jax.numpy, compiled by XLA; there are kernels for sm_90 GPUs only",
    }
    return {"name": name, "device": devices[0]["kind"], "why": why[name]}


def _cache() -> dict[str, Any]:
    """Returns the directory of compiled programs, its size, and the space left beside it."""
    directory = cache_directory()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return {
        "directory": str(directory),
        "bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        "free": shutil.disk_usage(there).free,
        "writable": os.access(there, os.W_OK),
    }


def _hazards(
    devices: list[dict[str, Any]], memory: dict[str, int], cache: dict[str, Any]
) -> list[str]:
    """Returns what is known to go wrong in such surroundings, each with its way out."""
    found = []
    on_gpu = any(device["platform"] == "gpu" for device in devices)
    forced = os.environ.get("JAX_PLATFORMS")
    if not on_gpu and pathlib.Path("/proc/driver/nvidia/version").exists():
        way_out = f"unset JAX_PLATFORMS (now {forced})" if forced else "install openjet-jax[cuda12]"
        found.append(f"There is an NVIDIA driver, but JAX does not use a GPU: {way_out}.")
    if on_gpu and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() != "false":
        found.append(
            "JAX takes 75 % of the GPU's memory at start: where other programs share the GPU, set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false."
        )
    if on_gpu and "xla_gpu_enable_command_buffer=" in os.environ.get("XLA_FLAGS", ""):
        found.append(
            "XLA_FLAGS changes command buffers: without them every kernel launch costs about 3 us "
            "instead of 1; remove the flag."
        )
    if memory and memory["available"] < LITTLE_MEMORY:
        gib = memory["available"] / GIB
        found.append(
            f"Only {gib:.1f} GiB of memory are free: `openjet-jax inspect` says what fits."
        )
    if cache["free"] < LITTLE_DISK or not cache["writable"]:
        found.append(
            f"Compiled programs cannot be kept in {cache['directory']} (not writable, or the disk "
            "is full): set OPENJET_CACHE to another directory."
        )
    return found


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


def render(facts: dict[str, Any], width: int = 100) -> str:
    """Returns the facts as text for a terminal.

    Args:
      facts: what `examine` returned.
      width: columns of the terminal.
    """
    table = Table.grid(padding=(0, 2))
    for name, version in facts["versions"].items():
        table.add_row(name, version)
    table.add_row("Python", facts["python"])
    memory = facts["memory"]
    amount = f"{_size(memory.get('available'))} free of {_size(memory.get('total'))}"
    table.add_row("machine", f"{facts['machine']}; {facts['cores']} cores; {amount}")
    for device in facts["devices"]:
        capability = device["compute_capability"]
        parts = [device["kind"], f"compute capability {capability}" if capability else ""]
        parts.append(_size(device["memory"]) if device["memory"] else "")
        table.add_row("device", ", ".join(part for part in parts if part))
    cache = facts["cache"]
    kept = f"{cache['bytes'] / 2**20:.0f} MiB kept, {_size(cache['free'])} free"
    table.add_row("programs", f"{cache['directory']}; {kept}")
    backend = facts["backend"]
    table.add_row("will use", f"{backend['name']} on {backend['device']}: {backend['why']}")
    hazards = [Text(f"! {hazard}") for hazard in facts["hazards"]] or [Text("No known hazards.")]
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as captured:
        console.print(Group(table, Text(), *hazards))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
