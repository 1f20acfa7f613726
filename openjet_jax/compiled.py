"""The one place that compiles: programs are lowered from shapes, compiled ahead of time and kept.

What was compiled is kept by `program_store`, without tree structures: they are rebuilt from the
state's own specification. The state is donated to every program that returns one, except `fork`: no
second copy of it is alive.
"""

import dataclasses
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.config import enable_compilation_cache
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from openjet_jax.architectures import initial_state, logits
from openjet_jax.config import DecodeConfig, ModelConfig
from openjet_jax.cycle import cycles
from openjet_jax.depth import CycleTime
from openjet_jax.draft_vocabulary import empty_slots
from openjet_jax.prefill import mtp_chunk, prefill
from openjet_jax.program_store import ProgramStore, cache_directory, environment, say
from openjet_jax.settings import SamplingKind
from openjet_jax.state import CycleInfo, DecodeState
from openjet_jax.state_checkpoints import (
    KVBlock,
    StateCheckpoint,
    copied,
    hold_tokens,
    read_block,
    rewind,
    take_checkpoint,
    write_block,
)
from openjet_jax.weights import Weights

type Executable = Callable[..., Any]

_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}
"""Kernels start before the one before has ended in streams, but not in the CUDA graphs of XLA."""


@dataclasses.dataclass(frozen=True)
class CompileEvent:
    """One program made ready: its name, seconds, and whether it had to be compiled."""

    name: str
    seconds: float
    compiled: bool


class WeightsFirst:
    """A program whose first argument is the weights; it takes them as they are, or as `flat` made.

    A model's weights are some fifty modules in a tree: walking it at each call takes a millisecond.
    """

    def __init__(self, compiled: Any):
        """Takes the compiled program of the leaves and the other arguments."""
        self.compiled = compiled

    def __call__(self, weights: Weights | tuple, *arguments: Any) -> Any:
        """Returns the program's result."""
        return self.compiled(flat(weights), *arguments)

    def __getattr__(self, name: str) -> Any:
        """Returns what the compiled program tells of itself."""
        return getattr(self.compiled, name)


def flat(weights: Weights | tuple) -> tuple:
    """Returns the arrays of weights, or of their shapes, in order."""
    return weights if isinstance(weights, tuple) else tuple(jax.tree.leaves(weights))


def _start(config: ModelConfig, decode: DecodeConfig, weight_specs: Weights) -> DecodeState:
    return initial_state(config, decode, empty_slots(weight_specs))


class Programs:
    """The compiled programs of one model at one set of shapes.

    Attributes:
      events: what was made ready, in order; tests count compilations here.
      cycle_times: what cycles of each sampling kind were measured to take, for automatic depth.
    """

    def __init__(
        self,
        config: ModelConfig,
        decode: DecodeConfig,
        weights: Weights,
        store: ProgramStore | None = None,
        target: jax.sharding.Sharding | None = None,
    ):
        """Takes shapes only: `weights` may be arrays or ShapeDtypeStructs.

        Args:
          config: the model.
          decode: the shapes.
          weights: the weights, or their specs.
          store: where programs are kept; by default the user's cache directory.
          target: a device that is not here; programs for it can be looked at, not run or kept.
        """
        self.config, self.decode, self.target = config, decode, target
        self.weight_specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
        self._start = functools.partial(_start, config, decode, self.weight_specs)
        self.state_specs = jax.eval_shape(self._start)
        if store is None:
            store = ProgramStore(cache_directory() / "programs" if target is None else None)
        self.store = store
        self._options = _NO_GRAPHS if weights.kernels else {}
        self.events: list[CompileEvent] = []
        self.cycle_times: dict[SamplingKind, CycleTime] = {}
        self._ready: dict[str, Future[Executable]] = {}
        self._lock = threading.Lock()
        self._compiling = False

    @property
    def num_compiled(self) -> int:
        """Programs that were compiled rather than found."""
        return sum(event.compiled for event in self.events)

    def temporary_bytes(self) -> dict[str, int]:
        """Returns the temporary memory of every program that is ready, as its compiler planned it.

        Arguments and results are not counted.
        """
        programs: dict[str, Any] = {name: made.result() for name, made in self._ready.items()}
        found = {name: program.memory_analysis() for name, program in programs.items()}
        return {name: facts.temp_size_in_bytes for name, facts in found.items() if facts}

    def prepare(self, *gets: Callable[[], Executable]) -> None:
        """Makes several programs ready at once: compilers run side by side.

        Args:
          gets: calls of this object's own methods, such as `partial(programs.prefill, 64)`.
        """
        for ready in self.begin(*gets):
            ready.result()

    def begin(self, *gets: Callable[[], Executable]) -> list[Future[Executable]]:
        """Starts what `prepare` does, and returns at once; whoever calls a method waits for it."""
        pool = ThreadPoolExecutor(max_workers=len(gets) or 1, thread_name_prefix="programs")
        ready = [pool.submit(get) for get in gets]
        pool.shutdown(wait=False)
        return ready

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
        leaf: Any = 0
        fields = {field.name: leaf for field in dataclasses.fields(CycleInfo)}
        if not kind.ranked:
            fields |= {"top_logprobs": None, "top_ids": None}
        info = CycleInfo(**fields)
        out = (self.state_specs, info, 0)
        return self._get(
            f"cycles_{kind.method}{'_adjusted' * kind.adjusted}{'_masked' * kind.masked}"
            f"{'_ranked' * kind.ranked}_depth{max_depth}",
            run,
            args,
            out,
            donate=1,
        )

    def logits(self, rows: int) -> Executable:
        """Returns the program `(weights, hidden[rows]) -> logits[rows, vocab]`."""
        hidden = jax.ShapeDtypeStruct((rows, *self.state_specs.hidden.shape), jnp.float32)
        run = functools.partial(logits, config=self.config)
        return self._get(f"logits_{rows}", run, (self.weight_specs, hidden), 0)

    def mtp_logits(self, rows: int) -> Executable:
        """Returns `(weights, kv, tokens[rows], hidden[rows], start, count) -> (kv, logits[rows])`.

        The MTP block over known tokens and the hidden rows before them.
        """
        count = jax.ShapeDtypeStruct((), jnp.int32)
        tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
        hidden = jax.ShapeDtypeStruct((rows, *self.state_specs.hidden.shape), jnp.float32)
        kv = self.state_specs.mtp_kv
        run = functools.partial(mtp_chunk, config=self.config)
        args = (self.weight_specs, kv, tokens, hidden, count, count)
        return self._get(f"mtp_logits_{rows}", run, args, (kv, 0), donate=1)

    # JAX keeps something of every call of `eval_shape`, so these are asked for once.
    @functools.cached_property
    def _checkpoint_specs(self) -> StateCheckpoint:
        return jax.eval_shape(take_checkpoint, self.state_specs)

    @functools.cached_property
    def _block_specs(self) -> KVBlock:
        index = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.eval_shape(read_block, self.state_specs, index)

    def take_checkpoint(self) -> Executable:
        """Returns the program `(state) -> StateCheckpoint`, a copy; the state stays."""
        specs = self._checkpoint_specs
        return self._get("take_checkpoint", take_checkpoint, (self.state_specs,), specs)

    def rewind(self) -> Executable:
        """Returns the program `(state, checkpoint, tokens[capacity], length) -> state`."""
        state, length = self.state_specs, jax.ShapeDtypeStruct((), jnp.int32)
        args = (state, self._checkpoint_specs, state.tokens, length)
        return self._get("rewind", rewind, args, state, donate=0)

    def fork(self) -> Executable:
        """Returns the program `(state) -> state`, a copy; the state stays."""
        return self._get("fork", copied, (self.state_specs,), self.state_specs)

    def read_block(self) -> Executable:
        """Returns the program `(state, index) -> KVBlock`, a copy; the state stays."""
        args = (self.state_specs, jax.ShapeDtypeStruct((), jnp.int32))
        return self._get("read_block", read_block, args, self._block_specs)

    def write_block(self) -> Executable:
        """Returns the program `(state, block, index) -> state`."""
        state, index = self.state_specs, jax.ShapeDtypeStruct((), jnp.int32)
        args = (state, self._block_specs, index)
        return self._get("write_block", write_block, args, state, donate=0)

    def hold_tokens(self, rows: int) -> Executable:
        """Returns the program `(weights, state, tokens[rows], count) -> state`."""
        tokens, count = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows,), ()))
        args = (self.weight_specs, self.state_specs, tokens, count)
        return self._get(f"hold_tokens_{rows}", hold_tokens, args, self.state_specs, donate=1)

    def _get(self, name: str, function, args: tuple, out, donate: int | None = None) -> Executable:
        """Returns a program, made ready on first use; `out` has the structure of its result."""
        with self._lock:
            known, mine = self._ready.get(name), Future()
            self._ready.setdefault(name, mine)
        if known is not None:
            return known.result()
        start = time.perf_counter()
        try:
            program, compiled = self._make(name, function, args, out, donate)
        except BaseException as error:
            del self._ready[name]
            mine.set_exception(error)
            raise
        self.events.append(CompileEvent(name, time.perf_counter() - start, compiled))
        mine.set_result(program)
        return program

    def _make(self, name: str, function, args: tuple, out, donate) -> tuple[Executable, bool]:
        if args and args[0] is self.weight_specs:
            tree = jax.tree.structure(args[0])

            def of_leaves(leaves, *rest):
                return function(jax.tree.unflatten(tree, leaves), *rest)

            key = self._key(name, (args, out), donate)
            args = (flat(self.weight_specs), *args[1:])
            compiled, new = self._made(name, key, of_leaves, args, out, donate)
            return WeightsFirst(compiled), new
        key = self._key(name, (args, out), donate)
        return self._made(name, key, function, args, out, donate)

    def _made(
        self, name: str, key: str, function, args: tuple, out, donate
    ) -> tuple[Executable, bool]:
        stored = self.store.load(key)
        if stored is not None:
            return stored.finish(jax.tree.structure((args, {})), jax.tree.structure(out)), False

        def program(*args):
            return function(*args)

        if self.store.directory is not None and not self._compiling:
            say(f"compiling programs; they are kept in {self.store.directory}")
        self._compiling = True
        program.__name__ = name
        donated = () if donate is None else donate
        if self.target is None:
            jitted = jax.jit(program, donate_argnums=donated)
        else:
            args = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.target), args
            )
            jitted = jax.jit(program, donate_argnums=donated, out_shardings=self.target)
        lowered = jitted.lower(*args)
        # What JAX's own cache loaded cannot be serialised again: on a CPU its functions are lost.
        # Once used, that cache looks at its switch no more until it is reset.
        compilation_cache.reset_cache()
        with enable_compilation_cache(False):
            compiled = lowered.compile(compiler_options=self._options)
        compilation_cache.reset_cache()
        if self.store.directory is not None:
            self.store.write(key, serialize_executable.serialize(compiled)[0])
        return compiled, True

    def _key(self, name: str, signature: tuple, donate: int | None) -> str:
        leaves, tree = jax.tree.flatten(signature)
        facts = {
            "name": name,
            "config": dataclasses.asdict(self.config),
            "decode": dataclasses.asdict(self.decode),
            "shapes": [str(x) for x in leaves],
            "tree": str(tree),
            "donate": donate,
            "environment": environment(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
