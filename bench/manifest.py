"""What a measurement ran on: device, driver, clocks, versions, commit, date.

Read once, as it is when the measurement ends; nothing is set. What a machine cannot tell is None.
The load is the mean number of processes that wanted a core in the last minute, this one included.
"""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

ROOT = pathlib.Path(__file__).parents[1]
GPU_FIELDS = (
    "name driver_version clocks.sm clocks.mem clocks.max.sm clocks.max.mem power.draw power.limit "
    "temperature.gpu"
).split()
"""What nvidia-smi is asked for; clocks in MHz, power in W, temperature in degrees Celsius."""


def _output(*command: str) -> str | None:
    """Returns what a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    """Returns the short hash of the commit, with `-dirty` where files other than results differ."""
    found = _output("git", "describe", "--always", "--abbrev=10", "--exclude=*")
    results = ":(exclude)bench/results"
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", results)
    return f"{found}-dirty" if found and changed else found


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpus() -> list[dict[str, str]]:
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    answer = _output("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = (line.split(", ") for line in (answer or "").splitlines())
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows]


def device_folder() -> str:
    """Returns the name results are filed under: `cpu`, or the GPU's model, such as `h200`."""
    device = jax.devices()[0]
    model = device.device_kind.lower().removeprefix("nvidia ")
    return "cpu" if device.platform == "cpu" else model.replace(" ", "-")


def manifest() -> dict[str, Any]:
    """Returns the facts of this run, JSON-ready."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _cpu(),
        "platform": device.platform,
        "runtime": device.client.platform_version,
        "num_devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "gpus": _gpus(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
