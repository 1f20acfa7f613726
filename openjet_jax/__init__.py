"""Exact, speculative decoding of Qwen3.8-class hybrid models from GGUF files, in JAX.

    import openjet_jax as oj

    model = oj.load("Qwen3.8-27B-Q4_K_M/")
    out = oj.generate(model, "def merge(a, b):", max_new_tokens=128, depth=4)

`load`, `generate` and `stream` are the everyday interface. Below them, `prefill` and `cycle` are
pure functions from weights and state to state, and compose under `jax.jit`.
"""

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
