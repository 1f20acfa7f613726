"""How much memory the device has, and how much of it a model may take now.

On a GPU that is the least of what JAX may still take and what the driver has left: others may use
the same one. On a CPU it is what the system, or the container's limit, leaves.
"""

import ctypes
import dataclasses
import pathlib

import jax

_CGROUP = pathlib.Path("/sys/fs/cgroup")
_MEMINFO = pathlib.Path("/proc/meminfo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of a device, in bytes.

    Attributes:
      device: what it is called.
      host: whether it is the host's own memory, where files are mapped and not copied.
      total: all it has.
      free: what may be taken.
    """

    device: str
    host: bool
    total: int
    free: int


def device_room() -> Room | None:
    """Returns the memory of JAX's default device, or None where nothing tells."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        memory = host_memory()
        if not memory:
            return None
        return Room(
            device="this machine", host=True, total=memory["total"], free=memory["available"]
        )
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    used = stats["bytes_in_use"]
    free, total = stats["bytes_limit"] - used, stats["bytes_limit"]
    if (driver := _driver_memory(device.local_hardware_id)) is not None:
        left, total = driver
        # What JAX has taken from the driver and not given out is free too.
        free = min(free, left + stats.get("pool_bytes", used) - used)
    return Room(device=device.device_kind, host=False, total=total, free=max(free, 0))


def host_memory() -> dict[str, int]:
    """Returns the machine's `total` and `available` memory in bytes, as far as Linux tells.

    A container's limit (cgroup v2) counts, less what it holds and could not drop at once.
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return {}
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        held = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        room = limit - held + int(stat["inactive_file"])
        return {"total": min(total, limit), "available": max(0, min(available, room))}
    except (OSError, ValueError, KeyError):  # no such limit ("max" is no number)
        return {"total": total, "available": available}


def _driver_memory(ordinal: int) -> tuple[int, int] | None:
    """Returns the free and total bytes of a GPU as its driver counts them, None if it cannot say.

    JAX's own context is used, which exists once, whoever asks for it.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else (free.value, total.value)
