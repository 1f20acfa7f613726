"""Golden models and their answers, loaded once; small ones always, all of them where they are."""

import dataclasses
import functools
import os
import pathlib

import numpy as np

from openjet_jax.compiled import Programs, ProgramStore
from openjet_jax.config import MAX_DEPTH, DecodeConfig, ModelConfig
from openjet_jax.conversation import Conversation
from openjet_jax.convert.pipeline import convert_gguf
from openjet_jax.depth import DepthPolicy
from openjet_jax.settings import Sampling
from openjet_jax.stacks import load_weights
from openjet_jax.weights import Weights

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "qwen35": ROOT / "tests" / "data" / "golden",
    "qwen4exp": ROOT / "tests" / "data" / "golden_qwen4exp",
}
SPECULATING = {"qwen35": "q8_0", "qwen4exp": "f32_mtp"}
"""A small case of each architecture: DeltaNet and attention layers, an MTP block."""

SHARED = ROOT.parent / "shared" / "golden"
CACHE = ROOT / ".pytest_cache" / "programs"

DECODE = DecodeConfig(context=200, chunks=(192,))
"""One chunk holds every golden prompt, so that a case compiles few programs."""


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    config: ModelConfig
    weights: Weights
    programs: Programs
    answers: dict[str, np.ndarray]

    def conversation(self, ids) -> Conversation:
        conversation = Conversation(self.weights, self.programs)
        conversation.read(ids)
        return conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithinDeepest(DepthPolicy):
    """A fixed depth inside the program of the largest depth, so that all depths compile one."""

    @property
    def max_depth(self) -> int:
        return MAX_DEPTH


def fixed(depth: int, case: Case) -> DepthPolicy:
    kind = WithinDeepest if case.config.has_mtp else DepthPolicy
    return kind(depth=depth, after_rejection=depth)


def folder(architecture: str) -> pathlib.Path:
    shared = SHARED / architecture
    return shared if shared.exists() else SMALL[architecture]


def names(architecture: str = "qwen35") -> list[str]:
    return sorted(path.stem for path in folder(architecture).glob("*.gguf"))


def checkpoint_of(name: str, architecture: str) -> pathlib.Path:
    """Where `case` leaves a model's checkpoint; processes that test side by side have their own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    return CACHE / "checkpoints" / worker / architecture / name


@functools.cache
def case(name: str, architecture: str = "qwen35") -> Case:
    source = folder(architecture)
    target = checkpoint_of(name, architecture)
    convert_gguf(source / f"{name}.gguf", target, force=True, quiet=True)
    config, weights = load_weights(target)
    answers = dict(np.load(source / f"{name}.npz"))
    rows = max(192, -(-(len(answers["tokens"]) + len(answers["greedy"])) // 64) * 64)
    decode = DECODE if rows == 192 else DecodeConfig(context=rows + 64, chunks=(rows,))
    programs = Programs(config, decode, weights, ProgramStore(CACHE))
    return Case(name, config, weights, programs, answers)


def relative_rms(y: object, x: object) -> float:
    """Returns sqrt(mean((y - x)^2) / mean(x^2)) in float64."""
    y, x = np.asarray(y, np.float64), np.asarray(x, np.float64)
    assert y.shape == x.shape
    return float(np.sqrt(np.mean((y - x) ** 2) / np.mean(x**2)))


def greedy(case: Case, ids, depth: int, count: int):
    """Returns the emitted tokens and, for each cycle after the first, how many drafts survived."""
    conversation = case.conversation(ids)
    bursts = list(conversation.run(Sampling(), fixed(depth, case), max_new_tokens=count))
    tokens = [token for burst in bursts for token in burst.token_ids]
    accepted = [a for burst in bursts for _, a in burst.cycles]
    return tokens, accepted[1:]
