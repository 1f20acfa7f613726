"""Sessions of a small golden model, whose programs other tests have compiled already."""

import functools

import numpy as np
from golden import CACHE, DECODE, case, relative_rms

import openjet_jax as oj
from openjet_jax.config import DecodeConfig

NAME = "q8_0"  # two DeltaNet layers, one attention layer, an MTP block
BOUND = 1e-5

PENALISED = oj.Sampling(
    temperature=0.9,
    top_k=40,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    seed=4,
)


@functools.cache
def model() -> oj.Model:
    programs = case(NAME).programs
    loaded = oj.load(CACHE / "checkpoints" / "qwen35" / NAME)
    loaded.programs[DecodeConfig(context=DECODE.context)] = programs
    return loaded


def session(**settings) -> oj.Session:
    """A session of 200 positions, with a checkpoint at least every 32."""
    return oj.Session(model(), **{"context": DECODE.context, "checkpoint_every": 32, **settings})


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def answer(session: oj.Session, count: int = 16, **settings) -> list[int]:
    settings = {"depth": 5, "ignore_eos": True, **settings}
    return session.generate(max_new_tokens=count, **settings).token_ids.tolist()


def fresh(ids, count: int = 16, **settings) -> list[int]:
    """The answer of a session that reads these ids in one go."""
    other = session()
    other.append(ids)
    return answer(other, count, **settings)


def parts(session: oj.Session) -> dict[str, np.ndarray]:
    """Everything that the committed positions left behind, once nothing is pending."""
    config, state = session.model.config, session._memory.conversation.state
    assert int(state.recurrent.num_pending) == 0
    n, start = int(state.length), int(state.recurrent.start)
    assert state.mtp_kv is not None
    found = {
        "delta": state.recurrent.delta,
        "history": state.recurrent.window[:, start : start + config.history],
        "hidden": state.hidden,
        "k": state.kv.k[:, :n],
        "v": state.kv.v[:, :n],
        "mtp_k": state.mtp_kv.k[:, 1:n],
        "mtp_v": state.mtp_kv.v[:, 1:n],
    }
    return {name: np.array(part) for name, part in found.items()}


def assert_close(ours: oj.Session, theirs: oj.Session) -> None:
    a, b = parts(ours), parts(theirs)
    assert all(relative_rms(a[name], b[name]) < BOUND for name in b if b[name].any())
    assert ours.ids == theirs.ids


def assert_same_bits(ours: oj.Session, theirs: oj.Session) -> None:
    a, b = parts(ours), parts(theirs)
    assert all(a[name].tobytes() == b[name].tobytes() for name in b)
    assert ours.ids == theirs.ids
