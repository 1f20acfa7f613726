"""Exact, speculative decoding of Qwen3.8-class hybrid models from GGUF files, in JAX.

    import openjet_jax as oj

    model = oj.load("Qwen3.8-27B-Q4_K_M/")
    out = oj.generate(model, "def merge(a, b):", max_new_tokens=128, depth=4)

`load`, `generate` and `stream` are the everyday interface. Below them, `prefill` and `cycle` are
pure functions from weights and state to state, and compose under `jax.jit`.

A name is imported when it is first used: JAX takes seconds, and the command line's help needs none.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openjet_jax.architectures import initial_state
    from openjet_jax.checkpoint_store import CheckpointBudget
    from openjet_jax.config import DecodeConfig, ModelConfig
    from openjet_jax.conversation import Conversation
    from openjet_jax.cycle import cycle, cycles
    from openjet_jax.engine import Generation, Piece, generate, stream
    from openjet_jax.loading import Model, load
    from openjet_jax.prefill import prefill
    from openjet_jax.prefix_cache import PrefixCache
    from openjet_jax.sampling import SamplingState
    from openjet_jax.scoring import score
    from openjet_jax.session import Session
    from openjet_jax.session_format import SessionFileError
    from openjet_jax.session_memory import Reuse, SessionFacts
    from openjet_jax.settings import Sampling, SamplingKind
    from openjet_jax.state import CycleInfo, DecodeState
    from openjet_jax.stats import Stats
    from openjet_jax.weights import Weights

__version__ = "0.1.0"

__all__ = [
    "CheckpointBudget",
    "Conversation",
    "CycleInfo",
    "DecodeConfig",
    "DecodeState",
    "Generation",
    "Model",
    "ModelConfig",
    "Piece",
    "PrefixCache",
    "Reuse",
    "Sampling",
    "SamplingKind",
    "SamplingState",
    "Session",
    "SessionFacts",
    "SessionFileError",
    "Stats",
    "Weights",
    "cycle",
    "cycles",
    "generate",
    "initial_state",
    "load",
    "prefill",
    "score",
    "stream",
]

_HOMES = {
    "CheckpointBudget": "checkpoint_store",
    "Conversation": "conversation",
    "CycleInfo": "state",
    "DecodeConfig": "config",
    "DecodeState": "state",
    "Generation": "engine",
    "Model": "loading",
    "ModelConfig": "config",
    "Piece": "engine",
    "PrefixCache": "prefix_cache",
    "Reuse": "session_memory",
    "Sampling": "settings",
    "SamplingKind": "settings",
    "SamplingState": "sampling",
    "Session": "session",
    "SessionFacts": "session_memory",
    "SessionFileError": "session_format",
    "Stats": "stats",
    "Weights": "weights",
    "cycle": "cycle",
    "cycles": "cycle",
    "generate": "engine",
    "initial_state": "architectures",
    "load": "loading",
    "prefill": "prefill",
    "score": "scoring",
    "stream": "engine",
}
"""The module that each public name lives in."""


class _Package(types.ModuleType):
    """Keeps `cycle` and `prefill` functions when the modules of those names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; the import system sets each module as one of its package."""
        if isinstance(value, types.ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Returns a public name, imported now (PEP 562).

    Raises:
      AttributeError: there is no such name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names and what is there already."""
    return sorted({*globals(), *_HOMES})
