"""Where compiled programs are kept, and everything outside a program that decides its machine code.

Programs are stored in the user's own cache directory (mode 0700). Loading one unpickles it, so its
SHA-256 is checked first, and programs never live inside a checkpoint that people share.
"""

import functools
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental import serialize_executable

SOURCES = ("openjet_jax/*.py", "pallas_kernels/*.py", "pallas_kernels/tuned_tiles/*.json")
"""What programs are traced from: modules, and the measured cuts of products."""

MAX_RECENT = 4
"""Programs that are remembered as those a process needs first: start, prefill, cycles."""


def cache_directory() -> pathlib.Path:
    """Returns where compiled programs live: `$OPENJET_CACHE`, else under `$XDG_CACHE_HOME`."""
    own = os.environ.get("OPENJET_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(own) if own else pathlib.Path(base) / "openjet-jax"


@functools.cache
def code_version() -> str:
    """Returns a hash of the sources that programs are traced from."""
    return hash_of_sources(pathlib.Path(__file__).parent.parent)


def hash_of_sources(root: pathlib.Path) -> str:
    """Returns a hash of the names and contents of `SOURCES` below a directory."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu_features() -> str:
    """Returns what decides the machine code that a CPU program may contain."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return platform.machine() + "".join(sorted(named))


@functools.cache
def environment() -> dict[str, str]:
    """Returns everything outside a program that its machine code depends on."""
    device = jax.devices()[0]
    return {
        "code": code_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "device": f"{device.platform} {device.device_kind}",
        "runtime": str(device.client.platform_version),
        "cpu": hashlib.sha256(_cpu_features().encode()).hexdigest(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "precision": str(jax.config.jax_default_matmul_precision),
        "x64": str(jax.config.jax_enable_x64),
    }


class StoredProgram:
    """A program loaded from its payload, which has no tree structures yet.

    `serialize_executable.deserialize_and_load` in two steps: the first costs the time, the second
    needs to know the arguments.
    """

    def __init__(self, payload: bytes):
        """Loads the machine code onto the default device."""
        file, client = io.BytesIO(payload), jax.devices()[0].client
        if client.platform != "cpu":
            _name_mosaic_runtime()
        unpickled = serialize_executable._JaxPjrtUnpickler(file, client).load()
        unloaded, self._args_info, self._no_kwargs = unpickled
        self._executable = unloaded.load()

    def finish(self, in_tree: Any, out_tree: Any) -> jax.stages.Compiled:
        """Returns the program with the structures of `(args, kwargs)` and of its result."""
        args_info = in_tree.unflatten(self._args_info)
        return jax.stages.Compiled(
            self._executable, [], args_info, out_tree, no_kwargs=self._no_kwargs
        )


class ProgramStore:
    """Serialised executables by key, in a private directory.

    Attributes:
      directory: where the files are; None keeps nothing.
    """

    def __init__(self, directory: pathlib.Path | None, model: str | None = None):
        """Makes the directory, readable by its owner alone.

        Args:
          directory: where the files are; None keeps nothing.
          model: a name that is good in a file's. The programs that the last process with this name
            needed first are loaded at once, beside whatever the caller does next.
        """
        self.directory = directory
        self._recent = directory / f"{model}.recent" if directory and model else None
        self._ahead: dict[str, Future[StoredProgram | None]] = {}
        self._used: list[str] = []
        self._lock = threading.Lock()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory.chmod(0o700)
            self._load_ahead()

    def path(self, key: str) -> pathlib.Path | None:
        """Returns the file of a key, whether it exists or not."""
        return self.directory / f"{key}.program" if self.directory else None

    def load(self, key: str) -> StoredProgram | None:
        """Returns a stored program, or None where there is none; says so if it is damaged."""
        self._remember(key)
        ahead = self._ahead.pop(key, None)
        return self._load(key) if ahead is None else ahead.result()

    def _load(self, key: str) -> StoredProgram | None:
        payload = self._read(key)
        if payload is None:
            return None
        try:
            return StoredProgram(payload)
        except Exception as error:  # whatever a stale payload raises, the way out is the same
            say(f"{key}.program: it does not load ({error}); compiling again")
            return None

    def _load_ahead(self) -> None:
        if not (keys := self._recall()):
            return
        # Two at a time, in the order of use: the first are needed before the others.
        pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="programs")
        self._ahead = {key: pool.submit(self._load, key) for key in keys}
        pool.shutdown(wait=False)

    def _recall(self) -> list[str]:
        """Returns the keys that the last process needed first.

        A file of anything else is void, and so is one of another environment: what was compiled
        there must not be loaded here.
        """
        try:
            found = json.loads(self._recent.read_text()) if self._recent else None
        except (OSError, ValueError):
            return []
        if not isinstance(found, dict) or found.get("environment") != environment():
            return []
        keys: Any = found.get("keys")
        named = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        return keys[:MAX_RECENT] if named and all(key.isalnum() for key in keys) else []

    def _remember(self, key: str) -> None:
        with self._lock:
            if self._recent is None or len(self._used) == MAX_RECENT or key in self._used:
                return
            self._used.append(key)
            if not set(self._used) <= set(self._recall()):
                recent = {"environment": environment(), "keys": self._used}
                _replace(self._recent, json.dumps(recent).encode())

    def _read(self, key: str) -> bytes | None:
        """Returns a stored payload, or None where there is none; says so if it is damaged."""
        path = self.path(key)
        if path is None or not path.exists():
            return None
        content = path.read_bytes()
        checksum, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != checksum:
            say(f"{path.name}: checksum differs; compiling again")
            return None
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """Stores a payload behind its checksum, atomically."""
        path = self.path(key)
        if path is None:
            return
        _replace(path, hashlib.sha256(payload).digest() + payload)


def _name_mosaic_runtime() -> None:
    """Tells XLA where stored Pallas kernels find what launches them.

    JAX does so where Mosaic GPU is imported, which takes a second that running them does not need.
    """
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return
    extension = getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
    if extension is not None:
        library = pathlib.Path(extension.__file__).parent / "libmosaic_gpu_runtime.so"
        os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(library))


def _replace(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, atomically."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def say(line: str) -> None:
    """Prints a line about programs where no output is mixed with it."""
    print(f"openjet-jax: {line}", file=sys.stderr)
