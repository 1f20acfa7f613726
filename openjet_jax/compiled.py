"""The one place that compiles: programs are lowered from shapes, compiled ahead of time and kept.

Compiled programs are stored in the user's own cache directory (mode 0700). Loading one unpickles
it, so its SHA-256 is checked first, and programs never live inside a checkpoint that people share.
Tree structures are not stored: they are rebuilt from the state's own specification. The state is
donated to every program that returns one: no second copy of it is alive.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jaxlib
from jax._src.config import enable_compilation_cache
from jax.experimental import serialize_executable

from openjet_jax.config import DecodeConfig, ModelConfig
from openjet_jax.cycle import cycles
from openjet_jax.draft import mtp_chunk
from openjet_jax.draft_vocabulary import empty_slots
from openjet_jax.model import logits
from openjet_jax.prefill import prefill
from openjet_jax.settings import SamplingKind
from openjet_jax.state import CycleInfo, DecodeState, initial_state
from openjet_jax.weights import Weights

type Executable = Callable[..., object]

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
        "jaxlib": jaxlib.__version__,
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
            _say(f"{path.name}: checksum differs; compiling again")
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


def _say(line: str) -> None:
    print(f"openjet-jax: {line}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class CompileEvent:
    """One program made ready: its name, seconds, and whether it had to be compiled."""

    name: str
    seconds: float
    compiled: bool


def _start(config: ModelConfig, decode: DecodeConfig, weight_specs: Weights) -> DecodeState:
    return initial_state(config, decode, empty_slots(weight_specs))


class Programs:
    """The compiled programs of one model at one set of shapes.

    Attributes:
      events: what was made ready, in order; tests count compilations here.
    """

    def __init__(
        self,
        config: ModelConfig,
        decode: DecodeConfig,
        weights: Weights,
        store: ProgramStore | None = None,
    ):
        """Takes shapes only: `weights` may be arrays or ShapeDtypeStructs.

        Args:
          config: the model.
          decode: the shapes.
          weights: the weights, or their specs.
          store: where programs are kept; by default the user's cache directory.
        """
        self.config, self.decode = config, decode
        self.weight_specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
        self._start = functools.partial(_start, config, decode, self.weight_specs)
        self.state_specs = jax.eval_shape(self._start)
        self.store = ProgramStore(cache_directory() / "programs") if store is None else store
        self.events: list[CompileEvent] = []
        self._ready: dict[str, Executable] = {}

    @property
    def num_compiled(self) -> int:
        """Programs that were compiled rather than found."""
        return sum(event.compiled for event in self.events)

    def prepare(self, *gets: Callable[[], Executable]) -> None:
        """Makes several programs ready at once: compilers run side by side.

        Args:
          gets: calls of this object's own methods, such as `partial(programs.prefill, 64)`.
        """
        with ThreadPoolExecutor(max_workers=len(gets) or 1) as pool:
            for ready in [pool.submit(get) for get in gets]:
                ready.result()

    def start(self) -> Executable:
        """Returns the program `() -> state` of an empty conversation."""
        return self._get("start", self._start, (), self.state_specs)

    def prefill(self, rows: int) -> Executable:
        """Returns the program `(weights, state, tokens[rows + 1], count) -> (state, hidden)`."""
        tokens = jax.ShapeDtypeStruct((rows + 1,), jnp.int32)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        args = (self.weight_specs, self.state_specs, tokens, count)
        read = functools.partial(prefill, config=self.config)
        return self._get(f"prefill_{rows}", read, args, (self.state_specs, 0), donate=1)

    def cycles(self, kind: SamplingKind, max_depth: int) -> Executable:
        """Returns the program `(weights, state, count) -> (state, infos, ran)`.

        Args:
          kind: the sampling program.
          max_depth: most drafts a cycle makes; the depth in the state counts up to it.
        """
        count = jax.ShapeDtypeStruct((), jnp.int32)
        run = functools.partial(
            cycles,
            config=self.config,
            kind=kind,
            max_depth=max_depth,
            most=self.decode.cycles_per_dispatch,
        )
        args = (self.weight_specs, self.state_specs, count)
        info = CycleInfo(*(0 for _ in dataclasses.fields(CycleInfo)))
        out = (self.state_specs, info, 0)
        return self._get(
            f"cycles_{kind.method}{'_adjusted' * kind.adjusted}{'_masked' * kind.masked}"
            f"_depth{max_depth}",
            run,
            args,
            out,
            donate=1,
        )

    def logits(self, rows: int) -> Executable:
        """Returns the program `(weights, hidden[rows]) -> logits[rows, vocab]`."""
        hidden = jax.ShapeDtypeStruct((rows, self.config.hidden), jnp.float32)
        return self._get(f"logits_{rows}", logits, (self.weight_specs, hidden), 0)

    def mtp_logits(self, rows: int) -> Executable:
        """Returns `(weights, kv, tokens[rows], hidden[rows], start, count) -> (kv, logits[rows])`.

        The MTP block over known tokens and the hidden rows before them.
        """
        count = jax.ShapeDtypeStruct((), jnp.int32)
        tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
        hidden = jax.ShapeDtypeStruct((rows, self.config.hidden), jnp.float32)
        kv = self.state_specs.mtp_kv
        run = functools.partial(mtp_chunk, config=self.config)
        args = (self.weight_specs, kv, tokens, hidden, count, count)
        return self._get(f"mtp_logits_{rows}", run, args, (kv, 0), donate=1)

    def _get(self, name: str, function, args: tuple, out, donate: int | None = None) -> Executable:
        """Returns a program, made ready on first use; `out` has the structure of its result."""
        if name not in self._ready:
            start = time.perf_counter()
            self._ready[name], compiled = self._make(name, function, args, out, donate)
            self.events.append(CompileEvent(name, time.perf_counter() - start, compiled))
        return self._ready[name]

    def _make(self, name: str, function, args: tuple, out, donate) -> tuple[Executable, bool]:
        key = self._key(name, args, donate)
        payload = self.store.read(key)
        if payload is not None:
            trees = jax.tree.structure((args, {})), jax.tree.structure(out)
            try:
                return serialize_executable.deserialize_and_load(payload, *trees), False
            except Exception as error:  # whatever a stale payload raises, the way out is the same
                _say(f"{name}: the stored program does not load ({error}); compiling again")

        def program(*args):
            return function(*args)

        program.__name__ = name
        jitted = jax.jit(program, donate_argnums=() if donate is None else donate)
        # What JAX's own cache loaded cannot be serialised again: on a CPU its functions are lost.
        with enable_compilation_cache(False):
            compiled = jitted.lower(*args).compile()
        self.store.write(key, serialize_executable.serialize(compiled)[0])
        return compiled, True

    def _key(self, name: str, args: tuple, donate: int | None) -> str:
        leaves, tree = jax.tree.flatten(args)
        facts = {
            "name": name,
            "config": dataclasses.asdict(self.config),
            "decode": dataclasses.asdict(self.decode),
            "shapes": [f"{x.dtype}{list(x.shape)}" for x in leaves],
            "tree": str(tree),
            "donate": donate,
            "environment": environment(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
