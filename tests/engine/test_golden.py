"""Every golden model: logits, states and MTP against float64, text and acceptance by token."""

import dataclasses

import numpy as np
import pytest
from golden import SPECULATING, case, greedy, names, relative_rms

from openjet_jax.compiled import Programs

# Plain float32 arithmetic reaches 2e-6 on these models; a wrong constant costs 1e-2 or more.
BOUND = 1e-5

NAMES = names()


def padded(ids, size):
    tokens = np.zeros(size, np.int32)
    tokens[: len(ids)] = ids
    return tokens


def read_all(model, ids):
    """Returns the state and hidden rows after every token of a prompt, the last included."""
    tokens = padded(ids, 193)
    state = model.programs.start()()
    return model.programs.prefill(192)(model.weights, state, tokens, np.int32(len(ids)))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_gives_the_golden_logits_and_states(name):
    model = case(name)
    z, config = model.answers, model.config
    ids, rows = z["tokens"], z["rows"]
    state, hidden = read_all(model, ids)
    logits = model.programs.logits(192)(model.weights, hidden)
    assert relative_rms(logits[: len(ids)], z["logits"]) < BOUND
    assert relative_rms(hidden[: len(ids)], z["hidden"]) < BOUND
    stored = [config.gdn_layers.index(i) for i in z["delta_layers"]]
    delta = np.asarray(state.recurrent.delta)[stored]
    assert relative_rms(delta, z["delta_state"]) < BOUND
    history = state.recurrent.window[:, : config.history]
    assert relative_rms(history, z["conv_state"]) < BOUND
    assert relative_rms(np.asarray(state.kv.k)[:, rows], z["kv_k"]) < BOUND
    assert relative_rms(np.asarray(state.kv.v)[:, rows], z["kv_v"]) < BOUND
    if not config.has_mtp:
        return
    rows = z["mtp_rows"]
    assert relative_rms(np.asarray(state.mtp_kv.k)[0, rows], z["mtp_kv_k"]) < BOUND
    assert relative_rms(np.asarray(state.mtp_kv.v)[0, rows], z["mtp_kv_v"]) < BOUND
    _, logits = model.programs.mtp_logits(192)(
        model.weights,
        model.programs.start()().mtp_kv,
        padded(ids[1:], 192),
        np.asarray(hidden),
        np.int32(1),
        np.int32(len(ids) - 1),
    )
    assert relative_rms(logits[: len(ids) - 1], z["mtp_logits"]) < BOUND


@pytest.mark.parametrize("name", NAMES)
def test_text_is_the_golden_text_and_drafts_survive_as_often(name):
    model = case(name)
    z = model.answers
    for depth in range(6) if model.config.has_mtp else [0]:
        tokens, accepted = greedy(model, z["tokens"], depth, len(z["greedy"]))
        assert tokens == z["greedy"].tolist()
        if depth:
            golden = z[f"spec{depth}_accepted"]
            assert len(golden) >= len(accepted)
            assert accepted == golden[: len(accepted)].tolist()


@pytest.mark.parametrize("name", [n for n in NAMES if n in ("f32_r3", "q8_0", "iq4_nl_recr")])
def test_a_prompt_cut_anywhere_leaves_the_same_state(name):
    model = case(name)
    ids = model.answers["tokens"]
    whole, _ = read_all(model, ids)
    cuts = [1, 2, 3, 62, 63, 64, 65, len(ids) - 2, len(ids) - 1]
    for parts in [[1, 2], [64], *([cut] for cut in cuts)]:
        state, at = model.programs.start()(), 0
        for count in [*parts, len(ids) - sum(parts)]:
            tokens = padded(ids[at : at + count + 1], 193)
            run = model.programs.prefill(192)
            state, _ = run(model.weights, state, tokens, np.int32(count))
            at += count
        for field in ("delta", "window"):
            ours = np.asarray(getattr(state.recurrent, field))[:, : model.config.history]
            theirs = np.asarray(getattr(whole.recurrent, field))[:, : model.config.history]
            assert relative_rms(ours, theirs) < BOUND
        assert relative_rms(state.hidden, whole.hidden) < BOUND
        for ours, theirs in ((state.kv, whole.kv), (state.mtp_kv, whole.mtp_kv)):
            assert relative_rms(ours.k[:, 1 : len(ids)], theirs.k[:, 1 : len(ids)]) < BOUND
            assert relative_rms(ours.v[:, 1 : len(ids)], theirs.v[:, 1 : len(ids)]) < BOUND


@pytest.mark.skipif("f32_r3" not in NAMES, reason="needs ../shared/golden")
@pytest.mark.parametrize("count", [63, 64, 65])
def test_prompts_around_a_chunk_border_give_the_golden_states(count):
    model = case("f32_r3")
    z = model.answers
    state, hidden = read_all(model, z["tokens"][:count])
    assert relative_rms(hidden[count - 1], z[f"len{count}_hidden"]) < BOUND
    assert relative_rms(state.recurrent.delta, z[f"len{count}_delta_state"]) < BOUND
    history = state.recurrent.window[:, : model.config.history]
    assert relative_rms(history, z[f"len{count}_conv_state"]) < BOUND
    expected = z[f"len{count}_greedy"].tolist()
    assert greedy(model, z["tokens"][:count], 3, len(expected))[0] == expected


@pytest.mark.parametrize("architecture", SPECULATING)
def test_a_cache_of_bfloat16_stays_close_and_speculation_changes_nothing_on_it(architecture):
    """The bounds are those that the golden files set for activations of this type."""
    exact = case(SPECULATING[architecture], architecture)
    z, ids = exact.answers, exact.answers["tokens"]
    decode = dataclasses.replace(exact.programs.decode, kv_dtype="bfloat16")
    programs = Programs(exact.config, decode, exact.weights, exact.programs.store)
    model = dataclasses.replace(exact, programs=programs)
    state, hidden = read_all(model, ids)
    assert all(plane.dtype == "bfloat16" for plane in state.kv.planes().values())
    logits = np.asarray(programs.logits(192)(model.weights, hidden), np.float64)
    at = z.get("logit_rows", np.arange(len(ids)))
    golden, ours = (log_softmax(x) for x in (z["logits"].astype(np.float64), logits[at]))
    divergence = (np.exp(golden) * (golden - ours)).sum(-1)
    assert 1e-9 < np.median(divergence) < 5e-4
    assert np.quantile(divergence, 0.9) < 5e-3 and divergence.mean() < 3e-2
    texts = [greedy(model, ids, depth, 24)[0] for depth in (0, 1, 3, 5)]
    assert all(text == texts[0] for text in texts)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_a_wrong_constant_is_seen():
    """The bound is worth something: an epsilon ten times too large breaks it by far."""
    model = case(NAMES[-1])
    z = model.answers
    wrong = dataclasses.replace(model.config, eps=10 * model.config.eps)
    programs = type(model.programs)(
        wrong, model.programs.decode, model.weights, model.programs.store
    )
    state, hidden = programs.prefill(192)(
        model.weights, programs.start()(), padded(z["tokens"], 193), np.int32(len(z["tokens"]))
    )
    assert relative_rms(hidden[: len(z["tokens"])], z["hidden"]) > 100 * BOUND
