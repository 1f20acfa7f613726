"""Where compiled programs are kept, and everything outside a program that decides its machine code.

Programs are stored in the user's own cache directory (mode 0700). Loading one unpickles it, so its
SHA-256 is checked first, and programs never live inside a checkpoint that people share.
"""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys

import jax

PACKAGES = ("openjet_jax", "pallas_kernels")


def cache_directory() -> pathlib.Path:
    """Returns where compiled programs live: `$OPENJET_CACHE`, else under `$XDG_CACHE_HOME`."""
    own = os.environ.get("OPENJET_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(own) if own else pathlib.Path(base) / "openjet-jax"


@functools.cache
def code_version() -> str:
    """Returns a hash of the sources that programs are traced from."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent.parent
    for package in PACKAGES:
        for path in sorted((root / package).glob("*.py")):
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


class ProgramStore:
    """Serialised executables by key, in a private directory.

    Attributes:
      directory: where the files are; None keeps nothing.
    """

    def __init__(self, directory: pathlib.Path | None):
        """Makes the directory, readable by its owner alone."""
        self.directory = directory
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory.chmod(0o700)

    def path(self, key: str) -> pathlib.Path | None:
        """Returns the file of a key, whether it exists or not."""
        return self.directory / f"{key}.program" if self.directory else None

    def read(self, key: str) -> bytes | None:
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
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(hashlib.sha256(payload).digest() + payload)
        partial.replace(path)


def say(line: str) -> None:
    """Prints a line about programs where no output is mixed with it."""
    print(f"openjet-jax: {line}", file=sys.stderr)
