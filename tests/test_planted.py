"""A planted file decodes to its text, and its drafts are right exactly where they were planted."""

import argparse
import pathlib

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

import openjet_jax as oj
from bench import decode, prefill
from bench.planted import planted
from bench.synthetic_blocks import FORMATS, signed_blocks
from bench.synthetic_gguf import published, resized, write
from bench.synthetic_tensors import tensors
from openjet_jax.config import MAX_DEPTH
from openjet_jax.depth import DepthPolicy

SMALL = resized(
    published("27B")[0],
    num_layers=4,
    hidden=512,
    ffn=512,
    vocab=1024,
    heads=2,
    kv_heads=1,
    head_width=64,
    rotary=32,
    key_heads=2,
    value_heads=4,
    gdn_width=64,
)
RATE, TOKENS, CONTEXT = 0.7, 160, 192
"""One context everywhere, and prompts that one small program reads: few programs are compiled."""


pytestmark = pytest.mark.xdist_group("planted")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("planted") / "small.gguf"
    write(path, SMALL, tied=False, rate=RATE)
    return path


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_signs_are_exact_in_every_format(name: str):
    values = np.random.default_rng(0).integers(-1, 2, (3, 512)).astype(np.int8)
    blocks = signed_blocks(name, values, 0.875)
    found = dequantize(blocks.reshape(3, -1), FORMATS[name].kind)
    size = np.abs(found).max()
    assert size == pytest.approx(0.875, rel=1e-3)
    np.testing.assert_array_equal(found, size * values)


def test_a_planted_file_has_the_tensors_and_formats_of_any_other(path: pathlib.Path):
    read = {t.name: (tuple(t.shape[::-1]), t.tensor_type) for t in GGUFReader(path).tensors}
    assert read == {t.name: (t.shape, t.kind) for t in tensors(SMALL, tied=False)}
    assert "rate=0.7" in GGUFReader(path).fields["general.description"].contents()


@pytest.fixture(scope="module")
def model(path: pathlib.Path) -> oj.Model:
    return oj.load(path)


def test_text_and_accepted_drafts_are_those_that_were_planted_at_every_depth(model, monkeypatch):
    plan = planted(SMALL, False, RATE, seed=0)
    assert plan.known.mean() == pytest.approx(RATE, abs=1 / plan.circle)
    monkeypatch.setattr(DepthPolicy, "max_depth", MAX_DEPTH)
    prompt = [plan.circle + 20, 3, 700]
    text = [plan.following(prompt[-1])]
    while len(text) < TOKENS:
        text.append(plan.following(text[-1]))
    assert len(set(text)) == TOKENS
    for depth in range(1, MAX_DEPTH + 1):
        out = oj.generate(model, prompt, max_new_tokens=TOKENS, depth=depth, context=CONTEXT)
        assert out.token_ids.tolist() == text
        newest, expected = 0, []
        while newest + 1 < TOKENS:
            right = plan.known[[t % plan.circle for t in text[newest : newest + depth]]]
            expected.append(int(np.cumprod(right).sum()))
            newest += expected[-1] + 1
        # The last cycle may have been cut by the length.
        assert out.accepted[:-1] == expected[: len(out.accepted) - 1]
        assert abs(len(out.accepted) - len(expected)) <= 1
        reached = np.array(out.stats.drafted[:depth]) * [1, *out.stats.acceptance[: depth - 1]]
        share = sum(out.stats.accepted[:depth]) / reached.sum()
        # Three standard errors of that many draws.
        assert share == pytest.approx(RATE, abs=3 * (RATE * (1 - RATE) / reached.sum()) ** 0.5)


def test_what_cannot_be_planted_is_refused():
    with pytest.raises(ValueError, match="rate=1.5 must be in 0..1"):
        planted(SMALL, False, 1.5, 0)
    with pytest.raises(ValueError, match="a head of its own"):
        planted(SMALL, True, 0.5, 0)
    with pytest.raises(ValueError, match="Q5_0 has no signs here"):
        signed_blocks("Q5_0", np.zeros((1, 32), np.int8), 1.0)


def test_decoding_and_reading_are_timed_behind_their_gates(model, monkeypatch):
    args = argparse.Namespace(contexts=[24], depths=[4, 5], dispatches=3, kv_dtype=None)
    saved = []
    rows = decode.measure(model, args, lambda rows: saved.append(dict(rows)))
    assert [found["depths"] for found in saved] == [rows["depths"]]
    assert rows["context"] == 24 + 5 * 16 * 6 + 48
    (context,), (four, five) = rows["contexts"], rows["depths"]
    assert 0 < context["plain"]["low"] <= context["plain"]["value"] <= context["plain"]["high"]
    assert context["plain"]["value"] == pytest.approx(1e3 / context["ms"]["value"], rel=0.5)
    assert (four["depth"], five["depth"]) == (4, 5)
    assert 0.3 < four["acceptance"] < 1 and set(four["by_accepted_ms"]) <= set(range(5))
    named = decode.figures(rows | {"depths": [four | {"acceptance": 0.7}]}, [], "", {24: 1e9})
    assert [f.name for f in named] == ["plain_24", "cycle_d4", "depth4_70"]
    assert named[2].must == 305 and named[0].share_of_limit == named[0].value / 1e9

    reading = argparse.Namespace(lengths=[40, 64], turns=[64], runs=2, kv_dtype=None)
    found = prefill.measure(model, reading)
    assert [row["tokens"] for row in found["prompts"]] == [40, 64] and found["difference"] < 1e-5
    assert found["turns"][0]["seconds"]["value"] > 0
    starts = {"load_s": {"value": 7.0}}
    named = prefill.figures({"prompts": [{"tokens": 2048, "rate": {"value": 1.0}}]}, starts, {}, "")
    assert [(f.name, f.must) for f in named] == [("prefill_2k", 5500), ("load_s", 20)]

    # A gate that fails stops everything.
    monkeypatch.setattr(prefill, "DIFFERENCE", {"float32": 0.0})
    with pytest.raises(RuntimeError, match="reading in two parts differs by"):
        prefill.measure(model, reading)
    real = decode.decoded

    def other(conversation, depth, dispatches, per_dispatch=None):
        run = real(conversation, depth, dispatches, per_dispatch)
        run.token_ids[5] += depth > 0
        return run

    monkeypatch.setattr(decode, "decoded", other)
    with pytest.raises(RuntimeError, match="the text at depth 4 is another one"):
        decode.measure(model, args, lambda rows: None)
