"""The files that measurements run on are what they say: stock sizes, formats, a whole tokenizer."""

import collections
import dataclasses
import math
import pathlib

import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer, models

import openjet_jax as oj
from bench.synthetic_blocks import FORMATS, fitting, random_blocks
from bench.synthetic_gguf import VOCAB, published, resized, write
from bench.synthetic_tensors import RECIPES, tensors
from bench.synthetic_tokenizer import ADDED, byte_letters, merges, vocab_parts

SMALL = resized(
    published("27B")[0], num_layers=4, hidden=256, ffn=512, vocab=1024, heads=4, value_heads=32
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("synthetic") / "small.gguf"
    write(path, SMALL, tied=False)
    return path


@pytest.mark.parametrize(
    ("has_mtp", "q4_k", "q6_k", "f32", "num_bytes"),
    [(True, 439, 67, 360, 16_799_719_424), (False, 433, 65, 353, 16_536_406_016)],
)
def test_the_27b_has_the_format_table_of_a_stock_q4_k_m(has_mtp, q4_k, q6_k, f32, num_bytes):
    config, tied = published("27B", has_mtp)
    plan = list(tensors(config, tied))
    assert collections.Counter(t.form for t in plan) == {"Q4_K": q4_k, "Q6_K": q6_k, "F32": f32}
    assert sum(t.num_bytes for t in plan) == num_bytes


@pytest.mark.parametrize(
    ("size", "count", "parameters", "mtp_parameters"),
    [
        ("0.8B", 320, 752_393_024, 20_452_864),
        ("2B", 320, 1_881_825_088, 60_828_160),
        ("4B", 426, 4_205_751_296, 120_599_552),
        ("9B", 427, 8_953_803_264, 243_290_624),
        ("27B", 851, 26_895_998_464, 424_699_392),
    ],
)
def test_every_size_has_the_published_tensors(size, count, parameters, mtp_parameters):
    config, tied = published(size, has_mtp=False)
    plain = list(tensors(config, tied))
    with_mtp = list(tensors(published(size)[0], tied))
    assert (len(plain), len(with_mtp)) == (count, count + 15)
    assert sum(math.prod(t.shape) for t in plain) == parameters
    assert sum(math.prod(t.shape) for t in with_mtp) == parameters + mtp_parameters


def test_a_file_reads_back_with_the_planned_tensors(small: pathlib.Path):
    read = {t.name: (tuple(t.shape[::-1]), t.tensor_type) for t in GGUFReader(small).tensors}
    assert read == {t.name: (t.shape, t.kind) for t in tensors(SMALL, tied=False)}


def test_values_have_the_size_that_keeps_activations_near_one(small: pathlib.Path):
    read = {t.name: t for t in GGUFReader(small).tensors}
    for tensor in tensors(SMALL, tied=False):
        values = dequantize(read[tensor.name].data, read[tensor.name].tensor_type)
        assert np.isfinite(values).all()
        if tensor.form != "F32":
            assert np.sqrt(np.mean(values**2)) == pytest.approx(tensor.spread, rel=0.05)
            assert abs(values.mean()) < 0.1 * tensor.spread
    decay = read["blk.0.ssm_a"].data
    assert decay.min() >= -0.338 and decay.max() <= -0.0038


def test_a_seed_means_a_file(small: pathlib.Path, tmp_path: pathlib.Path):
    write(tmp_path / "again.gguf", SMALL, tied=False)
    write(tmp_path / "other.gguf", SMALL, tied=False, seed=1)
    assert (tmp_path / "again.gguf").read_bytes() == small.read_bytes()
    assert (tmp_path / "other.gguf").read_bytes() != small.read_bytes()


def test_a_file_says_that_it_is_synthetic(small: pathlib.Path):
    fields = GGUFReader(small).fields
    assert "synthetic" in fields["general.name"].contents()
    assert "random weights" in fields["general.description"].contents()


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_are_no_whole_blocks_fall_back_as_in_llama_quantize(recipe: str):
    odd = resized(SMALL, hidden=96)
    forms = {t.name: t.form for t in tensors(odd, tied=False, recipe=recipe)}
    fallback = {"Q4_K_M": "Q5_0", "Q8_0": "Q8_0", "Q6_K": "Q8_0"}[recipe]
    assert forms["blk.0.ffn_gate.weight"] == fallback
    assert forms["output.weight"] == "Q8_0"


def test_rows_that_no_format_fits_and_unknown_recipes_are_errors():
    with pytest.raises(ValueError, match="row=40 must be a multiple of 32"):
        fitting("Q4_K", 40)
    with pytest.raises(ValueError, match="recipe='Q3_K' is not known"):
        next(tensors(SMALL, tied=False, recipe="Q3_K"))


@pytest.mark.parametrize("name", FORMATS)
def test_no_block_repeats(name: str):
    blocks = next(random_blocks(name, (512, 2048), 0.1, (0,)))
    assert len(np.unique(blocks, axis=0)) == len(blocks)


def test_the_published_vocabulary_has_qwens_counts_and_unique_tokens():
    num_merges, unmerged, unused = vocab_parts(VOCAB)
    assert (num_merges, 256 + num_merges + unmerged, unused) == (247587, 248044, 243)
    assert len(ADDED) == 33 and ADDED[-9:-7] == ["<think>", "</think>"]
    tokens = byte_letters() + [left + right for left, right in merges(num_merges)]
    assert len(set(tokens)) == len(tokens) and tokens[198] == "\u010a"


def test_text_tokenizes_through_the_merges(small: pathlib.Path):
    fields = GGUFReader(small).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    pairs = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    vocab = {token: n for n, token in enumerate(tokens)}
    assert len(vocab) == SMALL.vocab
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    assert bpe.encode("\u0120the\u010a\u010a").tokens == ["\u0120t", "he", "\u010a\u010a"]


def test_the_engine_reads_a_file_and_its_activations_stay_near_one(small: pathlib.Path):
    model = oj.load(str(small))
    assert dataclasses.replace(model.config, eps=SMALL.eps) == SMALL
    ids = model.tokenizer.encode("the cat sat on the mat")
    logits = np.asarray(oj.score(model, np.array(ids))["logits"])[:, : SMALL.vocab_used]
    assert 2 < logits.std() < 4, "the head's gain is 3 for inputs of one"
