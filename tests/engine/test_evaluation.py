"""Divergence, agreement and perplexity are those of the definitions; llama.cpp's files are read."""

import dataclasses
import pathlib
import struct

import numpy as np
import pytest
import scipy.special

import openjet_jax as oj
from openjet_jax import evaluation
from openjet_jax.convert.pipeline import convert_gguf
from openjet_jax.engine import programs_for
from openjet_jax.evaluation import Comparison, estimate, evaluate, log_softmax, reader, render
from openjet_jax.llama_logits import open_logits
from openjet_jax.scoring import logits_of, read_hidden

DATA = pathlib.Path(__file__).parents[1] / "data" / "golden"
LLAMA = DATA.parent / "llama" / "q8_0_c48.logits"
WINDOW, WINDOWS = 32, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> oj.Model:
    folder = tmp_path_factory.mktemp("evaluation") / "model"
    return oj.load(convert_gguf(DATA / "q8_0.gguf", folder, quiet=True))


@pytest.fixture(scope="module")
def ids(model) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, model.config.vocab_used, WINDOW * WINDOWS + 7).astype(np.int32)


@pytest.fixture(scope="module")
def logits(model, ids) -> np.ndarray:
    """Logits [windows, window, vocab] of the model itself."""
    windows, programs = (
        ids[: WINDOW * WINDOWS].reshape(WINDOWS, WINDOW),
        programs_for(model, WINDOW),
    )
    hidden = [read_hidden(model, programs, window) for window in windows]
    return np.stack([logits_of(model, programs, rows) for rows in hidden])


def llama_file(path: pathlib.Path, tokens: np.ndarray, logits: np.ndarray) -> pathlib.Path:
    """Writes logits [windows, window, vocab] as llama-perplexity does, step by step in float32."""
    windows, window, vocab = logits.shape
    out = b"_logits_" + struct.pack("<3i", window, vocab, windows)
    out += tokens[: windows * window].astype("<i4").tobytes()
    for rows in logits:
        for row in rows[window // 2 : window - 1]:
            most = row.max()
            least = max(row.min(), np.float32(most - 16))
            log_sum = np.float32(np.log(np.exp(row - most).sum(dtype=np.float64)))
            scale = np.float32((most - least) / np.float32(65535))
            words = np.zeros(2 * ((vocab + 1) // 2), "<u2")
            if scale:
                steps = np.rint((row - least) / scale)
                words[:vocab] = np.where(row > least, steps, 0).astype("<u2")
            out += struct.pack("<2f", scale, least - most - log_sum) + words.tobytes()
    path.write_bytes(out)
    return path


def spread(logits: np.ndarray, seed: int = 1) -> np.ndarray:
    """Returns other logits, some far below the floor of a file."""
    noise = np.random.default_rng(seed).normal(size=logits.shape)
    return (2 * logits + noise).astype(np.float32)


def divergence(base: np.ndarray, ours: np.ndarray) -> np.ndarray:
    p, q = scipy.special.softmax(base, -1), scipy.special.softmax(ours, -1)
    return scipy.special.rel_entr(p, q).sum(-1)


def test_a_row_is_read_back_to_half_a_step_of_16_bits(tmp_path, ids, logits):
    theirs = spread(logits)
    file = open_logits(llama_file(tmp_path / "base", ids, theirs))
    assert (file.window, file.vocab, len(file.tokens)) == (WINDOW, logits.shape[2], WINDOWS)
    np.testing.assert_array_equal(file.tokens.reshape(-1), ids[: WINDOW * WINDOWS])
    exact = scipy.special.log_softmax(theirs.astype(np.float64), -1)
    first = WINDOW // 2
    for index in range(WINDOWS):
        rows = exact[index, first : WINDOW - 1]
        found = file.rows(index, first, WINDOW - 1)
        above = rows > rows.max(-1, keepdims=True) - 16
        assert above.any() and np.abs(found - rows)[above].max() < 0.51 * 16 / 65535 + 3e-6
        assert (found[~above] <= -16 + 1e-4).all()
    assert 0 < file.resolution(0) <= 16 / 65535 * 1.001


def test_windows_without_a_position_that_counts_are_refused(model, ids):
    with pytest.raises(ValueError, match="window=2 must be at least 3"):
        evaluate(reader(model, 2), ids)
    with pytest.raises(ValueError, match="windows=0 must be at least 1"):
        evaluate(reader(model, WINDOW), ids, windows=0)


@pytest.mark.parametrize("kv_dtype", ["float32", "q8_0"])
def test_a_file_that_llama_cpp_wrote_is_read_and_agrees(model, kv_dtype):
    """Of build 0c1e570 on a CPU, which rounds activations to q8_0: `-c 48 --chunks 4 -ctk f32`."""
    file = open_logits(LLAMA)
    assert (file.window, len(file.tokens)) == (48, 4)
    found = evaluate(reader(model, 48, kv_dtype), file.tokens.reshape(-1), file)
    assert found["positions"] == 92
    assert 1e-5 < found["kl"]["value"] < 1e-3 and found["top1"]["value"] > 0.95
    assert abs(found["perplexity_ratio"]["value"] - 1) < 0.02


@pytest.mark.parametrize("vocab", [5, 6])
def test_odd_vocabularies_are_padded_and_equal_logits_have_no_scale(tmp_path, vocab):
    theirs = np.zeros((1, 8, vocab), np.float32)
    theirs[0, 5] = np.arange(vocab)
    file = open_logits(llama_file(tmp_path / "base", np.zeros(8), theirs))
    found = file.rows(0, 4, 7)
    assert found.shape == (3, vocab)
    np.testing.assert_allclose(found[0], -np.log(vocab), rtol=1e-6)
    np.testing.assert_allclose(
        found[1], scipy.special.log_softmax(np.arange(vocab)), atol=vocab / 65535
    )


def test_a_file_gives_the_figures_of_its_definition(tmp_path, model, ids, logits):
    theirs = spread(logits)
    file = open_logits(llama_file(tmp_path / "base", ids, theirs))
    found = evaluate(reader(model, WINDOW, "float32"), ids, file)
    part = np.s_[:, WINDOW // 2 : WINDOW - 1]
    exact = divergence(theirs.astype(np.float64)[part], logits.astype(np.float64)[part])
    assert found["positions"] == exact.size and found["windows"] == WINDOWS
    # A file's words are off by up to half a step, and what is below its floor is left out.
    assert found["kl"]["value"] == pytest.approx(exact.mean(), abs=2 * found["base"]["resolution"])
    assert 1 - 1e-3 < found["base_mass"] < 1 + 1e-3
    same = theirs[part].argmax(-1) == logits[part].argmax(-1)
    assert found["top1"]["value"] == pytest.approx(same.mean())
    following = ids[: WINDOW * WINDOWS].reshape(WINDOWS, WINDOW)[:, WINDOW // 2 + 1 :]
    for key, values, floor in (("perplexity", logits, np.inf), ("base_perplexity", theirs, 16)):
        exact = values[part].astype(np.float64)
        # A token below the file's floor counts as one at the floor.
        kept = np.maximum(exact, exact.max(-1, keepdims=True) - floor)
        nll = scipy.special.logsumexp(exact, -1, keepdims=True) - kept
        chosen = np.take_along_axis(nll, following[..., None], -1)
        assert found[key]["value"] == pytest.approx(np.exp(chosen.mean()), rel=3e-4)
    assert sum(group["positions"] for group in found["by_position"]) == found["positions"]
    text = render(found)
    assert "mean KL divergence" in text and "29..30" in text


def test_a_model_does_not_differ_from_itself_and_does_from_a_coarser_cache(model, ids, logits):
    ours = reader(model, WINDOW, "float32")
    same = evaluate(ours, ids, reader(model, WINDOW, "float32"))
    assert same["kl"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert same["top1"]["value"] == 1.0 and same["perplexity_ratio"]["value"] == 1.0
    coarse = reader(model, WINDOW, "bfloat16")
    found = evaluate(ours, ids, coarse, windows=2)
    assert 0 < found["kl"]["value"] < 1e-2 and found["windows"] == 2
    assert found["base"]["kv_dtype"] == "bfloat16"
    first = WINDOW // 2
    exact = [
        divergence(
            np.concatenate(list(coarse.rows(ids[i * WINDOW :][:WINDOW], first))),
            logits[i, first:-1].astype(np.float64),
        )
        for i in range(2)
    ]
    assert found["kl"]["value"] == pytest.approx(np.mean(exact), rel=1e-5)


def test_reading_one_by_one_agrees_with_reading_in_chunks(model, ids):
    one = reader(model, WINDOW, "float32", chunk=1)
    found = evaluate(reader(model, WINDOW, "float32"), ids, one, windows=1)
    assert 0 <= found["kl"]["value"] < 1e-9 and found["base"]["chunk"] == 1


def test_only_some_positions_have_logits_at_a_time(model, ids, monkeypatch):
    sizes = []
    logits_of = evaluation.logits_of

    def counted(model, programs, hidden):
        sizes.append(len(hidden))
        return logits_of(model, programs, hidden)

    monkeypatch.setattr(evaluation, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(evaluation, "logits_of", counted)
    found = evaluate(reader(model, WINDOW, "float32"), ids)
    assert max(sizes) == 4 and sum(sizes) == found["positions"] == WINDOWS * (WINDOW // 2 - 1)
    assert "kl" not in found and found["perplexity"]["low"] < found["perplexity"]["high"]


def test_an_improbable_base_token_that_the_model_excludes_counts_nothing():
    base = np.log(np.array([[0.5, 0.5, 1e-300]]))
    found = Comparison()
    found.take(0, np.log(np.array([[0.25, 0.75, 1e-30]])), base, np.array([1]), -16.0)
    expected = 0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(found.kl[0], [expected])
    np.testing.assert_allclose(found.mass[0], [1.0])
    assert found.same[0].tolist() == [False] and found.nll[0] == pytest.approx(-np.log(0.75))


def test_log_probabilities_sum_to_one_for_large_logits():
    found = log_softmax(np.array([[3e4, 3e4, -3e4], [0.0, 0.0, 0.0]], np.float32))
    np.testing.assert_allclose(np.exp(found).sum(-1), 1)


def test_intervals_hold_the_mean_of_correlated_values_about_as_often_as_they_say():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        noise, values = rng.normal(size=3000), np.zeros(3000)
        for i in range(1, 3000):
            values[i] = 0.8 * values[i - 1] + noise[i]
        found = estimate(values)
        assert found["low"] is not None and found["high"] is not None
        hits += found["low"] < 0 < found["high"]
    assert 0.91 < hits / 400 < 0.98
    assert estimate(np.ones(29)) == {"value": 1.0, "low": None, "high": None}


def test_a_file_that_is_cut_off_or_no_such_file_is_refused(tmp_path, ids, logits):
    whole = llama_file(tmp_path / "base", ids, logits).read_bytes()
    row = 2 * (4 + logits.shape[2])
    for content, message in [
        (whole[:-1], r"holds 4 of 5 windows"),
        (whole[: -row * (WINDOW // 2 - 1)], r"holds 4 of 5 windows"),
        (whole[:100], r"holds 0 of 5 windows"),
        (whole + b"x", r"holds 5 of 5 windows"),
        (whole[:19], "is not a file of logits"),
        (b"", "is not a file of logits"),
        (b"GGUF" + whole[4:], "is not a file of logits"),
        (whole[:8] + struct.pack("<3i", 32, -1, 5) + whole[20:], "is damaged"),
        (whole[:8] + struct.pack("<3i", 2, 288, 5) + whole[20:], "is damaged"),
    ]:
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_logits(tmp_path / "bad")
    start = 20 + 4 * WINDOW * WINDOWS
    (tmp_path / "bad").write_bytes(whole[:start] + b"\xff" * 8 + whole[start + 8 :])
    with pytest.raises(ValueError, match="window 0 has scales that are no numbers"):
        open_logits(tmp_path / "bad").rows(0, 16, 18)


def test_what_cannot_be_compared_is_refused_with_the_reason(tmp_path, model, ids, logits):
    ours = reader(model, WINDOW, "float32")
    file = open_logits(llama_file(tmp_path / "base", ids, logits))
    other = ids.copy()
    other[40] = (other[40] + 1) % 280
    for base, text, message in [
        (file, other, f"another text or tokenizer: token 40 is {ids[40]} there and {other[40]}"),
        (file, ids[:100], "token 100 is .* there and the end here"),
        (dataclasses.replace(file, vocab=99), ids, "vocabulary of 99 tokens, the model has 288"),
        (dataclasses.replace(file, tokens=file.tokens[:, :16]), ids, "windows of 16 tokens, not"),
        (reader(model, 64, "float32"), ids, "windows of 64"),
        (None, ids[: WINDOW - 1], "has 31 tokens, less than one window of 32"),
        (None, np.array([288] * WINDOW), "token id 288"),
        (None, np.ones(WINDOW), "one row of at least one integer"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate(ours, text, base)
    with pytest.raises(ValueError, match="more than the 4096 positions"):
        reader(model, 8192, "float32")
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        reader(model, WINDOW, "float32", chunk=0)
