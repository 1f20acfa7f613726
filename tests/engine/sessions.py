"""Sessions of small golden models, whose programs other tests have compiled already."""

import functools

import numpy as np
import pytest
from golden import DECODE, SPECULATING, case, checkpoint_of, relative_rms
from states import folded

import openjet_jax as oj
from openjet_jax.config import DecodeConfig

BOUND = 1e-5

BOTH = pytest.mark.parametrize("architecture", SPECULATING)

PENALISED = oj.Sampling(
    temperature=0.9,
    top_k=40,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    seed=4,
)


@functools.cache
def model(architecture: str = "qwen35") -> oj.Model:
    name = SPECULATING[architecture]
    programs = case(name, architecture).programs
    loaded = oj.load(checkpoint_of(name, architecture))
    loaded.programs[DecodeConfig(context=DECODE.context)] = programs
    return loaded


def session(architecture: str = "qwen35", **settings) -> oj.Session:
    """A session of 200 positions, with a checkpoint at least every 32."""
    settings = {"context": DECODE.context, "checkpoint_every": 32, **settings}
    return oj.Session(model(architecture), **settings)


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def answer(session: oj.Session, count: int = 16, **settings) -> list[int]:
    settings = {"depth": 5, "ignore_eos": True, **settings}
    return session.generate(max_new_tokens=count, **settings).token_ids.tolist()


def fresh(ids, count: int = 16, architecture: str = "qwen35", **settings) -> list[int]:
    """The answer of a session that reads these ids in one go."""
    other = session(architecture)
    other.append(ids)
    return answer(other, count, **settings)


def parts(session: oj.Session) -> dict[str, np.ndarray]:
    """Everything that the committed positions left behind, once nothing is pending."""
    state = session._memory.conversation.state
    assert int(state.recurrent.num_pending) == 0 and state.mtp_kv is not None
    found = folded(state, session.model.config)
    del found["tokens"]
    return found


def assert_close(ours: oj.Session, theirs: oj.Session) -> None:
    a, b = parts(ours), parts(theirs)
    assert all(relative_rms(a[name], b[name]) < BOUND for name in b if b[name].any())
    assert ours.ids == theirs.ids


def assert_same_bits(ours: oj.Session, theirs: oj.Session) -> None:
    a, b = parts(ours), parts(theirs)
    assert all(a[name].tobytes() == b[name].tobytes() for name in b)
    assert ours.ids == theirs.ids
