"""Every golden qwen4exp model: the trunk, its states and choices, text, drafts and rollbacks."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case, fixed, greedy, names, relative_rms
from hypothesis import given, settings
from hypothesis import strategies as st
from pooling_reference import rows_of
from test_cycle import ask, cycle

from openjet_jax import qwen4exp, sparse_attention
from openjet_jax.compiled import Programs
from openjet_jax.config import MAX_DEPTH, PADDINGS, ROWS, Pooling
from openjet_jax.cycle import cycle as run_cycle
from openjet_jax.depth import DepthPolicy
from openjet_jax.prefill import mtp_chunk
from openjet_jax.settings import Sampling, SamplingKind
from pallas_kernels.pooled_keys import update_list

# Plain float32 arithmetic reaches 1e-6 on these models, 7e-6 on the deepest.
BOUND = 2e-5

NAMES = names("qwen4exp")
DRAFTING = [name for name in NAMES if name not in ("f32_deep", "f32_ties", "q5_k_m")]


def load(name: str) -> Any:
    return case(name, "qwen4exp")


def padded(ids, size):
    tokens = np.zeros(size, np.int32)
    tokens[: len(ids)] = ids
    return tokens


def read(model, ids, state=None, start=0):
    """Returns the state and streams after more tokens, the last included."""
    (rows,) = model.programs.decode.chunks
    state = model.programs.start()() if state is None else state
    tokens = padded(ids, rows + 1)
    return model.programs.prefill(rows)(model.weights, state, tokens, np.int32(len(ids)))


def assert_states(state, config, expected: dict[str, np.ndarray]) -> None:
    """Compares the recurrent states and block keys with arrays named as in the golden files."""
    recurrent, start = state.recurrent, int(state.recurrent.start)
    found = {
        "conv_state": recurrent.window[:, start : start + config.history],
        "delta_state": recurrent.delta,
        "ple_hist": recurrent.ngrams[start : start + config.ngram_history],
        "raw": state.kv.raw[:, : expected["raw"].shape[1]],
        "pooled": state.kv.pooled[:, : expected["pooled"].shape[1]],
    }
    for name, array in found.items():
        assert relative_rms(array, expected[name]) < BOUND, name


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_gives_the_golden_logits_streams_and_states(name):
    model = load(name)
    z, config = model.answers, model.config
    ids, rows, count = z["tokens"], z["rows"], len(z["tokens"])
    state, streams = read(model, [*ids, *z["greedy"]])
    (size,) = model.programs.decode.chunks
    logits = np.asarray(model.programs.logits(size)(model.weights, streams))
    at = z.get("logit_rows", np.arange(count))
    assert relative_rms(logits[at], z["logits"]) < BOUND
    steps = count - 1 + np.arange(len(z["greedy"]))
    assert relative_rms(logits[steps], z["greedy_logits"]) < BOUND
    assert np.array_equal(logits[steps, : config.vocab_used].argmax(-1), z["greedy"])
    shape = (len(rows), config.streams, config.hidden)
    assert relative_rms(np.asarray(streams)[rows].reshape(shape), z["layers"][-1]) < BOUND
    assert relative_rms(np.asarray(state.kv.k)[:, rows], z["kv_k"]) < BOUND
    assert relative_rms(np.asarray(state.kv.v)[:, rows], z["kv_v"]) < BOUND
    state, streams = read(model, ids)
    assert_states(state, config, z)
    assert int(state.kv.retained) == count // 4
    if not config.has_mtp:
        return
    assert relative_rms(np.asarray(state.mtp_kv.k)[0, rows], z["mtp_kv_k"]) < BOUND
    assert relative_rms(np.asarray(state.mtp_kv.v)[0, rows], z["mtp_kv_v"]) < BOUND
    if config.mtp_sparse:
        assert relative_rms(np.asarray(state.mtp_kv.raw)[0, :count], z["mtp_raw"]) < BOUND
        pooled = np.asarray(state.mtp_kv.pooled)[0, : count // 4]
        assert relative_rms(pooled, z["mtp_pooled"]) < BOUND
    before = np.concatenate([np.zeros((1, config.width), np.float32), np.asarray(streams)[:-1]])
    run, kv = model.programs.mtp_logits(size), model.programs.start()().mtp_kv
    _, logits = run(model.weights, kv, padded(ids, size), before, np.int32(0), np.int32(count))
    assert relative_rms(np.asarray(logits)[at], z["mtp_logits"]) < BOUND


class Recorder:
    """Wraps functions of the model so that what they return inside a program is kept."""

    def __init__(self, monkeypatch):
        self.patch, self.found = monkeypatch, {}

    def keep(self, key, *arrays):
        self.found[key] = tuple(np.array(array) for array in arrays)

    def wrap(self, module, name, key, pick):
        inner = getattr(module, name)

        def outer(*args, **kwargs):
            out = inner(*args, **kwargs)
            place, arrays = key(*args), pick(out)
            jax.debug.callback(
                lambda place, *a: self.keep(f"{name}{int(place)}", *a), place, *arrays
            )
            return out

        self.patch.setattr(module, name, outer)


@pytest.mark.parametrize("name", NAMES)
def test_every_query_selects_the_golden_blocks_and_every_layer_mixes_its_streams(name, monkeypatch):
    model = load(name)
    z, config = model.answers, model.config
    recorder = Recorder(monkeypatch)
    recorder.wrap(sparse_attention, "selection", lambda h, layer, *_: layer, lambda out: out)
    recorder.wrap(sparse_attention, "block_scores", lambda q, p, layer, *_: layer, lambda s: (s,))

    def half(x, weights, layer, config):
        return jnp.asarray(layer) * 2 + int(weights is model.weights.ffn_streams)

    recorder.wrap(qwen4exp, "mix", half, lambda out: out)
    (rows,) = model.programs.decode.chunks
    ids, count = z["tokens"], len(z["tokens"])
    state = model.programs.start()()
    trunk = functools.partial(qwen4exp.trunk, model.weights, config, chunked=True)
    caches = (state.recurrent, state.kv)
    jax.block_until_ready(jax.jit(trunk)(padded(ids, rows), np.int32(0), np.int32(count), caches))
    jax.effects_barrier()
    for i in range(len(config.sparse_layers)):
        blocks, counted = recorder.found[f"selection{i}"]
        selected = np.where(counted, blocks, -1)[:count]
        width = z["sel"].shape[2]
        assert np.array_equal(selected[:, :width], z["sel"][i])
        (scores,) = recorder.found[f"block_scores{i}"]
        expected, ours = z["score"][i], scores[z["rows"], : z["score"].shape[2]]
        assert np.array_equal(np.isnan(expected), ours == -np.inf)
        seen = ~np.isnan(expected)
        assert relative_rms(ours[seen], expected[seen]) < BOUND
    for layer in range(config.num_layers):
        for half_layer, kind in enumerate(("attn", "ffn")):
            u, iota = recorder.found[f"mix{2 * layer + half_layer}"]
            assert relative_rms(u[z["rows"]], z[f"u_{kind}"][layer]) < BOUND
            assert relative_rms(iota[z["rows"]], z[f"iota_{kind}"][layer]) < BOUND


@pytest.mark.parametrize("name", [n for n in NAMES if n != "f32_ties"])
def test_any_cut_of_a_prompt_leaves_the_same_state(name):
    model = load(name)
    ids, config = model.answers["tokens"], model.config
    for cuts in ([1, 2, 3, 4], [5, 63], [64], [len(ids) - 1]):
        state, at = model.programs.start()(), 0
        for count in [*np.diff([0, *cuts]), len(ids) - cuts[-1]]:
            state, streams = read(model, ids[at : at + count], state)
            at += int(count)
        assert_states(state, config, model.answers)
        assert int(state.kv.retained) == len(ids) // 4


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_the_listed_lengths_give_the_golden_states_and_text(name):
    model = load(name)
    z = model.answers
    lengths = sorted({int(k[3:].split("_")[0]) for k in z if k.startswith("len")})
    for count in lengths:
        state, streams = read(model, z["tokens"][:count])
        expected = {k.removeprefix(f"len{count}_"): v for k, v in z.items()}
        assert_states(state, model.config, expected)
        text = z[f"len{count}_greedy"].tolist()
        assert greedy(model, z["tokens"][:count], 3, len(text))[0] == text


def started(model, depth: int) -> Any:
    state, _ = read(model, model.answers["tokens"][:-1])
    tokens = np.array(state.tokens)
    tokens[int(state.length)] = model.answers["tokens"][-1]
    return ask(model, dataclasses.replace(state, tokens=tokens), depth)


def own_drafts(model, state, depth: int) -> Any:
    """Runs one cycle on the drafts that the state holds."""
    return cycle(model, state, np.asarray(state.drafts)[: int(state.num_drafts)])


@pytest.mark.parametrize("name", DRAFTING)
def test_speculation_follows_the_golden_trace_at_every_depth(name):
    model = load(name)
    z = model.answers
    capacity = int(z["capacity_blocks"])
    for depth in range(1, 6):
        state, info = own_drafts(model, started(model, depth), depth)
        tokens = info.tokens[: int(info.num_tokens)].tolist()
        trace = {k.removeprefix(f"spec{depth}_"): v for k, v in z.items()}
        for i, drafts in enumerate(trace["drafts"]):
            assert np.asarray(state.drafts)[: int(state.num_drafts)].tolist() == drafts.tolist()
            assert int(state.length) == trace["n"][i]
            assert int(state.kv.retained) == trace["v"][i]
            if model.config.mtp_sparse:
                assert int(state.mtp_kv.retained) == trace["mtp_trim"][i]
                assert_list(trace, i, "mtp_", capacity, trace["mtp_trim"][i])
            assert_list(trace, i, "", capacity, trace["v"][i])
            state, info = own_drafts(model, state, depth)
            assert int(info.accepted) == trace["accepted"][i]
            assert int(state.kv.retained) == trace["kept"][i]
            tokens += info.tokens[: int(info.num_tokens)].tolist()
        assert tokens == trace["tokens"].tolist()
        assert tokens[: len(z["greedy"])] == z["greedy"].tolist()


def assert_list(trace, i: int, prefix: str, capacity: int, retained) -> None:
    """Compares an update list with a golden one, row by row."""
    kind = trace[f"{prefix}kind"][i]
    if (kind < 0).any():
        return
    updates = update_list(jnp.int32(retained), jnp.int32(trace[f"{prefix}nb"][i]), 8, capacity)
    blocks, destinations, found = rows_of(updates)
    assert found.tolist() == kind.tolist()
    assert destinations.tolist() == trace[f"{prefix}dst"][i].tolist()
    assert blocks.tolist() == trace[f"{prefix}blocks"][i].tolist()
    assert (kind == 1).sum() == trace[f"{prefix}cnt"][i]


@pytest.mark.parametrize("name", [n for n in DRAFTING if n != "q4_k_m"])
def test_draft_rows_are_the_golden_ones(name, monkeypatch):
    """Logits of drafts show small mistakes of the MTP cache before tokens do."""
    model = load(name)
    z, found = model.answers, []
    module = importlib.import_module("openjet_jax.head_choice")
    inner = module.draft_logits

    def recorded(*args):
        logits, ids = inner(*args)
        jax.debug.callback(lambda row: found.append(np.array(row[0])), logits, ordered=True)
        return logits, ids

    monkeypatch.setattr(module, "draft_logits", recorded)
    run = jax.jit(
        functools.partial(run_cycle, config=model.config, kind=SamplingKind(), max_depth=3)
    )
    state, rows = started(model, 3), []
    for _ in z["spec3_draft_logits"]:
        found.clear()
        state, _ = run(model.weights, state)
        jax.effects_barrier()
        rows.append(np.stack(found))
    assert relative_rms(np.stack(rows), z["spec3_draft_logits"]) < BOUND


@functools.cache
def _window_program(name: str, rows: int, chunked: bool):
    model = load(name)

    def run(tokens, start, count, keep, recurrent, kv: Any):
        streams, (recurrent, kv) = qwen4exp.trunk(
            model.weights, model.config, tokens, start, count, (recurrent, kv), chunked=chunked
        )
        retained = kv.retained  # pyright: ignore[reportAttributeAccessIssue]  # a SparseCache
        if not chunked:
            recurrent = recurrent.committed(keep)
        logits = qwen4exp.features(model.weights, model.config, streams)
        return logits, recurrent, kv.committed(start + keep), retained

    return jax.jit(run)


@pytest.mark.parametrize("name", NAMES)
def test_scripted_windows_and_rollbacks_follow_the_golden_trace(name):
    model = load(name)
    z, capacity = model.answers, int(model.answers["capacity_blocks"])
    first = int(z["win_start"])
    state, _ = read(model, z["tokens"][:first])
    recurrent, kv, logits = state.recurrent, state.kv, []
    for i, count in enumerate(z["win_m"]):
        tokens, start, keep = z["win_tokens"][i], int(z["win_n"][i]), int(z["win_keep"][i])
        assert int(kv.retained) == z["win_v"][i]
        trace = {k.removeprefix("win_"): v for k, v in z.items() if k.startswith("win_")}
        assert_list(trace, i, "", capacity, z["win_v"][i])
        chunked = bool(count > ROWS)  # such windows keep everything
        run = _window_program(name, 64 if chunked else ROWS, chunked)
        rows = padded(tokens[:count], 64 if chunked else ROWS)
        hidden, recurrent, kv, complete = run(
            rows, np.int32(start), np.int32(count), np.int32(keep), recurrent, kv
        )
        assert int(complete) == z["win_nb"][i] and int(kv.retained) == z["win_kept"][i]
        logits.append(hidden[keep - 1])
    head = np.asarray(model.weights.head.dense(0))
    assert relative_rms(np.asarray(jnp.stack(logits)) @ head.T, z["win_logits"]) < BOUND


POOLINGS = [
    Pooling(padding=padding, retention=retention)
    for padding in PADDINGS
    for retention in (True, False)
] + [Pooling(rewrite_fillers=True)]


@functools.cache
def continued(name: str, pooling: Pooling, depth: int):
    """Returns the text and the block keys after some greedy cycles."""
    model = load(name)
    decode = dataclasses.replace(model.programs.decode, pooling=pooling)
    programs = Programs(model.config, decode, model.weights, model.programs.store)
    model = dataclasses.replace(model, programs=programs)
    conversation = model.conversation(model.answers["tokens"])
    bursts = conversation.run(Sampling(), fixed(depth, model), max_new_tokens=40)
    tokens = [token for burst in bursts for token in burst.token_ids]
    kv: Any = conversation.state.kv
    length = int(conversation.state.length)
    assert kv.retained == (length // 4 if pooling.retention else 0)
    return tokens, np.asarray(kv.pooled)[:, : length // 4]


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_text_is_the_same_at_every_depth_and_however_block_keys_are_maintained(
    pooling, monkeypatch
):
    tokens, pooled = continued("f32_mtp", Pooling(), 0)
    if pooling != Pooling():  # one program for all depths; with the default each has its own
        monkeypatch.setattr(DepthPolicy, "max_depth", MAX_DEPTH)
    for depth in range(MAX_DEPTH + 1):
        others, keys = continued("f32_mtp", pooling, depth)
        assert others == tokens
        same = min(pooled.shape[1], keys.shape[1])
        assert np.array_equal(pooled[:, :same].view(np.uint32), keys[:, :same].view(np.uint32))


READINGS: dict[str, dict[str, Any]] = {
    "stream": {"mtp_norm": "stream"},
    "prev": {"mtp_position": "hidden"},
    "dense": {"mtp_sparse": False},
    "stream_dense": {"mtp_norm": "stream", "mtp_sparse": False},
    "reuse": {"mtp_selection": "first"},
}
"""How implementations read the MTP block differently, as the golden files name it."""


def reading(model, name: str) -> Any:
    """Returns a case whose MTP block is read in another way."""
    config = dataclasses.replace(model.config, **READINGS[name])
    return dataclasses.replace(
        model,
        config=config,
        programs=Programs(config, model.programs.decode, model.weights, model.programs.store),
    )


@pytest.mark.parametrize("name", DRAFTING)
def test_other_readings_of_the_mtp_block_give_the_golden_logits(name):
    plain = load(name)
    z, (size,) = plain.answers, plain.programs.decode.chunks
    rows, count = z["rows"], len(z["tokens"])
    _, streams = read(plain, z["tokens"])
    zeros = np.zeros((1, plain.config.width), np.float32)
    before = np.concatenate([zeros, np.asarray(streams)[:-1]])
    for key in READINGS:
        if key == "reuse":
            continue
        model = reading(plain, key)
        kv = qwen4exp.initial_mtp_cache(model.config, model.programs.decode)
        run = jax.jit(functools.partial(mtp_chunk, config=model.config))
        ids = padded(z["tokens"], size)
        _, logits = run(model.weights, kv, ids, before, np.int32(0), np.int32(count))
        at = rows[rows >= 1] if key == "prev" else rows
        assert relative_rms(np.asarray(logits)[at], z[f"mtp_{key}_logits"]) < BOUND, key
        standard = np.asarray(logits)[z.get("logit_rows", np.arange(count))]
        different = relative_rms(standard, z["mtp_logits"]) > 100 * BOUND
        assert different or (key == "dense" and not plain.config.mtp_sparse), key


@pytest.mark.parametrize(
    ("name", "key"), [("f32_mtp", "prev"), ("f32_mtp", "dense"), ("f32_mtp", "reuse")]
)
def test_other_readings_of_the_mtp_block_make_the_golden_drafts_and_the_same_text(name, key):
    model = reading(load(name), key)
    z, drafts, accepted, tokens = model.answers, [], [], []
    state, info = own_drafts(model, started(model, 3), 3)
    for _ in z[f"spec3_{key}_drafts"]:
        tokens += info.tokens[: int(info.num_tokens)].tolist()
        drafts.append(np.asarray(state.drafts)[: int(state.num_drafts)])
        state, info = own_drafts(model, state, 3)
        accepted.append(int(info.accepted))
    assert np.array_equal(drafts, z[f"spec3_{key}_drafts"])
    assert accepted == z[f"spec3_{key}_accepted"].tolist()
    assert not np.array_equal(drafts, z["spec3_drafts"])
    assert tokens[: len(z["greedy"])] == z["greedy"].tolist()[: len(tokens)]


@functools.cache
def trunks():
    """Returns a model, and its trunk: as it is, with everything selected, and dense."""
    model = load("f32_mtp")
    config = dataclasses.replace(model.config, budget=512, mtp_sparse=False)
    dense = dataclasses.replace(config, sparse=(False,) * config.num_layers)
    runs = []
    for variant in (model.config, config, dense):
        caches = qwen4exp.initial_caches(variant, model.programs.decode)
        run = jax.jit(functools.partial(qwen4exp.trunk, model.weights, variant, chunked=True))
        runs.append(functools.partial(run, caches=caches))
    return model, runs


@settings(max_examples=12, deadline=None)
@given(count=st.integers(1, 192), start=st.integers(0, 64), seed=st.integers(0, 2**32 - 1))
def test_with_everything_selected_sparse_attention_is_dense_attention(count, start, seed):
    """Whatever the text and wherever it is cut; with a smaller budget, up to that and a tail."""
    model, runs = trunks()
    (rows,) = model.programs.decode.chunks
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_used, 2 * rows)
    first = min(start, count - 1)
    streams = []
    for run in runs:
        out, caches = run(padded(ids[:first], rows), np.int32(0), np.int32(first))
        more = padded(ids[first:count], rows)
        rest, _ = run(more, np.int32(first), np.int32(count - first), caches=caches)
        streams.append(np.concatenate([out[:first], rest[: count - first]]))
    seen = 4 * model.config.budget + 3
    assert relative_rms(streams[1], streams[2]) < 2e-6
    assert relative_rms(streams[0][:seen], streams[2][:seen]) < 2e-6


def test_with_a_small_budget_sparse_attention_parts_from_dense():
    model, runs = trunks()
    z, (rows,) = model.answers, model.programs.decode.chunks
    ids, count = padded(z["tokens"], rows), len(z["tokens"])
    few, _, dense = (np.asarray(run(ids, np.int32(0), np.int32(count))[0]) for run in runs)
    seen = 4 * model.config.budget + 3
    assert relative_rms(few[seen + 1 : count], dense[seen + 1 : count]) > 1e-3
