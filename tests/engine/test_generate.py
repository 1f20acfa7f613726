"""`generate`, `stream` and the pure functions under them, as a program that uses them sees them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import openjet_jax as oj
from openjet_jax import conversation as conversation_module
from openjet_jax import engine
from openjet_jax.config import MAX_DEPTH
from openjet_jax.depth import DepthPolicy
from openjet_jax.engine import programs_for
from openjet_jax.prefill import prefill

pytestmark = pytest.mark.xdist_group("tiny")

PROMPT = "def merge(a, b):\n"
SHAPES: Any = {"context": 256}
"""As `score` and the tests of `chat` have, so that programs are shared."""

WARM = oj.Sampling(temperature=1.0, top_k=20, seed=5, presence_penalty=0.3)


@pytest.fixture(scope="module")
def model() -> oj.Model:
    return oj.load("tiny")


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Every depth runs in the program of the largest, so that it compiles once."""
    monkeypatch.setattr(DepthPolicy, "max_depth", MAX_DEPTH)


def generate(model: oj.Model, prompt: engine.Prompt = PROMPT, **settings: Any) -> oj.Generation:
    return oj.generate(model, prompt, **{"max_new_tokens": 24, "depth": 5} | SHAPES | settings)


def test_text_ends_before_a_stop_string_however_tokens_and_dispatches_cut_it(model):
    whole = generate(model)
    assert whole.finish_reason == "length" and len(whole.token_ids) == 24
    stops = [whole.text[i : i + size] for i, size in ((1, 1), (9, 3), (30, 12))]
    for stop in stops:
        for cycles in (1, 2, 3, 4):
            out = generate(model, stop=["never", stop], cycles_per_dispatch=cycles)
            assert out.text == whole.text[: whole.text.find(stop)]
            assert out.finish_reason == "stop"
            used = len(out.token_ids)
            assert out.token_ids.tolist() == whole.token_ids[:used].tolist()
            assert len(out.logprobs) == used
            # The last token is the one that completes the stop string.
            assert stop in model.tokenizer.decode(out.token_ids)
            assert stop not in model.tokenizer.decode(out.token_ids[:-1])
    assert generate(model, stop=[whole.text + "!"]).text == whole.text


def test_a_stop_id_ends_generation_at_every_depth_and_is_the_last_token(model):
    whole = generate(model).token_ids.tolist()
    stop_id = whole[13]
    at = whole.index(stop_id)
    for depth in range(MAX_DEPTH + 1):
        out = generate(model, stop_ids=[stop_id], depth=depth)
        assert out.token_ids.tolist() == whole[: at + 1] and out.finish_reason == "stop"
        assert out.text == model.tokenizer.decode(whole[: at + 1])


def test_the_models_own_stop_ids_end_an_answer_unless_they_are_ignored(model):
    talk = [{"role": "user", "content": "Write a function that adds two numbers."}]
    settings: Any = SHAPES | {"messages": talk, "max_new_tokens": 80, "depth": 5}
    out = oj.generate(model, **settings)
    assert out.finish_reason == "stop" and out.token_ids[-1] in model.tokenizer.stop_ids
    assert "<|im_end|>" not in out.text and "def add" in out.text
    on = oj.generate(model, ignore_eos=True, **settings)
    assert on.finish_reason == "length" and len(on.token_ids) == 80
    assert on.token_ids[: len(out.token_ids)].tolist() == out.token_ids.tolist()


def test_messages_are_the_prompt_that_the_template_makes_of_them(model):
    talk = [{"role": "user", "content": "Write a stack."}]
    for options in ({}, {"enable_thinking": False}):
        out = oj.generate(
            model, messages=talk, template_options=options, max_new_tokens=8, depth=5, **SHAPES
        )
        ids = model.render(talk, **options)
        assert out.stats.prompt_tokens == len(ids)
        assert out.token_ids.tolist() == generate(model, ids, max_new_tokens=8).token_ids.tolist()


def test_generation_ends_at_the_length_asked_for_or_where_the_context_is_full(model):
    for count in (1, 2, 7):
        out = generate(model, max_new_tokens=count)
        assert len(out.token_ids) == count and out.finish_reason == "length"
    ids = (model.tokenizer.encode(PROMPT) * 10)[:60]
    conversation = oj.Conversation(model.weights, programs_for(model, 256))
    out = oj.generate(
        model, ids, conversation=conversation, max_new_tokens=1000, depth=5, ignore_eos=True
    )
    assert len(ids) + len(out.token_ids) == 256 and out.finish_reason == "length"
    assert len(conversation.ids) == 256
    with pytest.raises(ValueError, match="257 tokens do not fit context=256"):
        oj.generate(model, [1], conversation=conversation, depth=5)


def test_ids_of_any_integer_array_type_are_the_same_prompt(model):
    ids = model.tokenizer.encode(PROMPT)
    expected = generate(model, max_new_tokens=6).token_ids.tolist()
    for prompt in (
        ids,
        tuple(ids),
        np.asarray(ids, np.uint16),
        np.asarray(ids, np.int64)[::-1][::-1],
        jnp.asarray(ids, jnp.int32),
    ):
        out = generate(model, prompt, max_new_tokens=6)
        assert out.token_ids.tolist() == expected
        assert out.token_ids.dtype == np.int32 and out.logprobs.dtype == np.float32


def test_logprobs_are_those_of_the_scored_sequence(model):
    ids = model.tokenizer.encode(PROMPT)
    for sampling in (oj.Sampling(), WARM):
        out = generate(model, sampling=sampling)
        scores = oj.score(model, [*ids, *out.token_ids])["logits"].astype(np.float64)
        rows = scores[len(ids) - 1 : -1, : model.config.vocab_used]
        rows = rows - rows.max(-1, keepdims=True)
        expected = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        expected = expected[np.arange(len(out.token_ids)), out.token_ids]
        # Chunks and cycles round differently, by about 1e-6 of a logit of size 10.
        np.testing.assert_allclose(out.logprobs, expected, rtol=0, atol=1e-4)


def test_sampled_text_is_the_same_at_every_depth_and_differs_by_seed(model):
    plain = generate(model, sampling=WARM, depth=0)
    for depth in (1, 2, 4, 5, "4/3", "auto"):
        out = generate(model, sampling=WARM, depth=depth)
        assert out.token_ids.tolist() == plain.token_ids.tolist()
        assert out.text == plain.text
    assert sum(out.accepted) > 0
    other = generate(model, sampling=dataclasses.replace(WARM, seed=6))
    assert other.token_ids.tolist() != plain.token_ids.tolist()


def test_a_piece_of_text_never_cuts_a_character(model):
    byte_ids = [i for i in range(256) if model.tokenizer.token_bytes(i) in (b"\xc3", b"\xa9")]
    assert len(byte_ids) == 2
    only = {i: 900.0 for i in byte_ids}
    sampling = oj.Sampling(temperature=100.0, top_k=20, logit_bias=only, seed=1)
    settings = {"sampling": sampling, "max_new_tokens": 60, "depth": 0, "cycles_per_dispatch": 1}
    found = list(oj.stream(model, PROMPT, **settings, **SHAPES))
    ids = [token for piece in found for token in piece.token_ids]
    assert set(ids) <= set(byte_ids) and len(found) >= 60
    text = "".join(piece.text for piece in found)
    assert text == b"".join(map(model.tokenizer.token_bytes, ids)).decode(errors="replace")
    assert "é" in text and "\ufffd" in text


def test_a_conversation_goes_on_as_if_everything_had_been_one_prompt(model):
    conversation = oj.Conversation(model.weights, programs_for(model, 256))
    settings: Any = {"conversation": conversation, "max_new_tokens": 9, "depth": 3}
    first = oj.generate(model, PROMPT, **settings)
    more = model.tokenizer.encode("\n\ndef split(text):\n")
    second = oj.generate(model, more, **settings)
    assert second.stats.prompt_tokens == len(more)
    whole = [*model.tokenizer.encode(PROMPT), *first.token_ids, *more]
    assert conversation.ids == [*whole, *second.token_ids]
    assert generate(model, whole, max_new_tokens=9).token_ids.tolist() == second.token_ids.tolist()


def test_a_word_repeated_does_not_spoil_the_state(model):
    """Equal keys make the triangle of a chunk as ill-conditioned as it gets."""
    ids = model.tokenizer.encode(" word") * 60
    scores = oj.score(model, ids)["logits"]
    conversation = oj.Conversation(model.weights, programs_for(model, 256))
    conversation.read(ids[:1])
    # One after another: a bias makes every generated token the repeated one.
    sampling = oj.Sampling(temperature=1.0, top_k=20, logit_bias={ids[0]: 1000.0})
    out = oj.generate(
        model, ids[:1], conversation=conversation, sampling=sampling, max_new_tokens=57, depth=5
    )
    assert out.token_ids.tolist() == ids[2:59]
    logprobs = jax.nn.log_softmax(scores)[1:58, ids[0]]
    np.testing.assert_allclose(out.logprobs, logprobs, rtol=0, atol=1e-3)


def test_weights_that_are_not_finite_are_an_error_and_not_a_text(model):
    bad = dataclasses.replace(model.weights, final_norm=model.weights.final_norm * jnp.inf)
    spoilt = dataclasses.replace(model, weights=bad)
    with pytest.raises(ValueError, match="logits are not finite"):
        generate(spoilt)
    with pytest.raises(ValueError, match="logits are not finite"):
        oj.score(spoilt, [1, 2])


REFUSED = [
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": jnp.zeros((0,), jnp.int32)}, "the prompt is empty"),
    ({"prompt": [[1, 2]]}, r"not int64\[1, 2\]"),
    ({"prompt": [0.5]}, "not float64"),
    ({"prompt": [8192]}, r"token id 8192 must be in 0\.\.8191"),
    ({"prompt": [-1]}, r"token id -1 must be in 0\.\.8191"),
    ({"prompt": "\ud800"}, "lone surrogate"),
    ({"prompt": [1] * 300}, "300 tokens do not fit context=256"),
    ({"prompt": None}, "either a prompt or messages"),
    ({"messages": [{"role": "user", "content": "a"}]}, "either a prompt or messages"),
    ({"template_options": {"enable_thinking": False}}, "a meaning for messages only"),
    ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer, at least 1"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer"),
    ({"depth": 6}, r"depth 6 must be in 0\.\.5"),
    ({"depth": 1.5}, "depth=1.5 is not a draft depth"),
    ({"depth": True}, "depth=True is not a draft depth"),
    ({"stop": "end"}, "must be a list of strings"),
    ({"stop": [""]}, "empty string"),
    ({"stop_ids": [8192]}, r"token id 8192 must be in 0\.\.8191"),
    ({"stop_ids": list(range(17))}, "17 stop ids are too many; at most 16"),
    ({"stop_ids": [1], "ignore_eos": True}, "ignore_eos contradicts"),
    ({"context": 9000}, "more than the 8192 positions"),
    ({"kv_dtype": "int4"}, "kv_dtype='int4' is not supported"),
    ({"cycles_per_dispatch": 0}, r"cycles_per_dispatch=0 must be in 1\.\.16"),
    ({"cycles_per_dispatch": 17}, r"cycles_per_dispatch=17 must be in 1\.\.16"),
    ({"sampling": oj.Sampling(logit_bias={8192: 1.0})}, "token 8192 must be below"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=[str(s)[:60] for s, _ in REFUSED])
def test_a_setting_that_is_off_is_refused_before_anything_runs(
    model, monkeypatch, settings, reason
):
    monkeypatch.setattr(conversation_module.Conversation, "read", None)
    monkeypatch.setattr(engine.Conversation, "run", None)
    with pytest.raises(ValueError, match=reason):
        oj.stream(model, **{"prompt": "a"} | SHAPES | settings)


def test_a_setting_that_does_not_exist_is_refused(model):
    with pytest.raises(TypeError, match="temprature"):
        oj.generate(model, "a", temprature=1.0)


def test_shapes_of_a_conversation_cannot_be_asked_for_again(model):
    conversation = oj.Conversation(model.weights, programs_for(model, 256))
    with pytest.raises(ValueError, match="are the conversation's own"):
        oj.generate(model, "a", conversation=conversation, context=256)


def test_prefill_and_cycle_compose_under_a_jit_of_the_users_own(model):
    ids = model.tokenizer.encode(PROMPT)
    config, decode = model.config, oj.DecodeConfig(context=100)
    sampling = dataclasses.replace(WARM, temperature=0.0, presence_penalty=0.0)

    @jax.jit
    def two_cycles(weights, tokens):
        state = oj.initial_state(config, decode)
        state, _ = prefill(weights, state, tokens, jnp.int32(len(ids) - 1), config=config)
        request = dataclasses.replace(
            state.request,
            remaining=jnp.int32(10),
            depth=jnp.int32(2),
            depth_after_rejection=jnp.int32(2),
        )
        state = dataclasses.replace(state, request=request)

        def step(state, _):
            return oj.cycle(weights, state, config=config, kind=sampling.kind, max_depth=2)

        return jax.lax.scan(step, state, length=3)

    tokens = jnp.zeros(65, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
    state, infos = two_cycles(model.weights, tokens)
    emitted = [
        t
        for row, n in zip(infos.tokens, infos.num_tokens, strict=True)
        for t in row[: int(n)].tolist()
    ]
    assert emitted == generate(model).token_ids[: len(emitted)].tolist()
    assert infos.drafted.tolist() == [0, 2, 2] and int(state.length) == len(ids) - 1 + len(emitted)
