"""Conversations whose keys and values are in q8_0: what it costs, and that all else is the same."""

import dataclasses
import functools

import jax
import numpy as np
from golden import CACHE, DECODE, SPECULATING, Case, case, checkpoint_of, greedy
from sessions import answer, text

import openjet_jax as oj
from openjet_jax.checkpoint import read_config
from openjet_jax.compiled import Programs, ProgramStore
from openjet_jax.config import DecodeConfig
from openjet_jax.memory import memory_plan

NAME, DTYPE = SPECULATING["qwen35"], "q8_0"
MEAN_KL, LARGEST_KL, MARGIN = 5e-5, 2e-3, 0.05
"""Bounds on what q8_0 does to a distribution, in nats; and the lead of the most probable token, in
log-probability, from which on it must stay the most probable."""


@functools.cache
def quantized() -> Case:
    exact = case(NAME)
    decode = dataclasses.replace(DECODE, kv_dtype=DTYPE)
    programs = Programs(exact.config, decode, exact.weights, ProgramStore(CACHE))
    return dataclasses.replace(exact, programs=programs)


@functools.cache
def model() -> oj.Model:
    programs = quantized().programs
    loaded = oj.load(checkpoint_of(NAME, "qwen35"))
    loaded.programs[DecodeConfig(context=DECODE.context, kv_dtype=DTYPE)] = programs
    return loaded


def session(**settings) -> oj.Session:
    settings = {"context": DECODE.context, "checkpoint_every": 32, "kv_dtype": DTYPE, **settings}
    return oj.Session(model(), **settings)


def log_softmax(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_alike(ours, theirs) -> None:
    """Compares logits with a q8_0 cache to those with a float32 cache."""
    ours, theirs = log_softmax(ours), log_softmax(theirs)
    kl = (np.exp(theirs) * (theirs - ours)).sum(-1)
    assert 0 < kl.mean() < MEAN_KL and kl.max() < LARGEST_KL
    best = np.sort(theirs, -1)
    clear = best[:, -1] - best[:, -2] >= MARGIN
    assert clear.mean() > 0.5
    assert np.array_equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


def test_a_golden_prompt_gives_nearly_the_golden_logits():
    ours = quantized()
    ids = ours.answers["tokens"]
    padded = np.zeros(193, np.int32)
    padded[: len(ids)] = ids
    state = ours.programs.start()()
    _, hidden = ours.programs.prefill(192)(ours.weights, state, padded, np.int32(len(ids)))
    logits = ours.programs.logits(192)(ours.weights, hidden)
    assert_alike(np.asarray(logits)[: len(ids)], ours.answers["logits"])


def test_the_bundled_model_gives_nearly_the_logits_of_a_float32_cache():
    tiny = oj.load("tiny")
    ids = tiny.tokenizer.encode("def merge(a, b):\n    out = []\n    while a and b:\n" * 3)[:64]
    ours, theirs = (oj.score(tiny, ids, kv_dtype=dtype)["logits"] for dtype in (DTYPE, "float32"))
    assert_alike(ours, theirs)


def test_text_is_the_same_at_every_depth():
    texts = [greedy(quantized(), text(40), depth, 32)[0] for depth in (0, 1, 5)]
    assert texts[0] == texts[1] == texts[2]


def test_a_saved_session_goes_on_bit_for_bit(tmp_path):
    ours = session()
    ours.append(text(40))
    answer(ours, 9)
    ours.save(tmp_path / "a.session")
    theirs = oj.Session.restore(model(), tmp_path / "a.session")
    more = [
        each.generate(max_new_tokens=20, continued=True, ignore_eos=True, depth=5)
        for each in (ours, theirs)
    ]
    assert more[0].token_ids.tolist() == more[1].token_ids.tolist()
    assert more[0].logprobs.tobytes() == more[1].logprobs.tobytes()


def test_a_published_session_is_taken_up_by_another_bit_for_bit():
    cache = oj.PrefixCache()
    ours, theirs = (session(prefixes=cache, isolation_key="a") for _ in range(2))
    ours.append(text(60))
    answer(ours, 13)
    ours.publish()
    for each in (ours, theirs):
        each.replace([*ours.ids[:73], 1, 2])
        each.read()
    assert theirs.reuse == oj.Reuse(reused=72, read=3, shared=72)
    a, b = (each._memory.conversation.state for each in (ours, theirs))
    for mine, other in zip(*(jax.tree.leaves(x.kv.planes()) for x in (a, b)), strict=True):
        n = int(a.length)
        assert np.array(mine[:, :n]).tobytes() == np.array(other[:, :n]).tobytes()
    assert answer(ours) == answer(theirs)


def test_the_cache_takes_eight_and_a_half_bits_a_value():
    config = read_config(model().directory)
    exact, ours = (
        memory_plan(config.model, config.tensors, DecodeConfig(context=1000, kv_dtype=dtype))
        for dtype in ("float32", DTYPE)
    )
    assert ours.kv * 32 == exact.kv * 8.5 and ours.mtp_kv * 32 == exact.mtp_kv * 8.5
    assert ours.kv_position * 32 == exact.kv_position * 8.5
