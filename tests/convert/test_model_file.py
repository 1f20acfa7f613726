"""What keys and tensor names say of a model: the traps of qwen35 files, one by one."""

import collections
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gguf_cases import U32, Keys, Tensors, small_keys, small_tensors, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from openjet_jax.config import Qwen35Config
from openjet_jax.convert.architectures import expected_tensors
from openjet_jax.convert.gguf import GGUFError
from openjet_jax.convert.model_file import ModelFile, read_model

type Write = Callable[..., ModelFile]


@pytest.fixture
def read(tmp_path: pathlib.Path) -> Write:
    """Returns a function that writes a model and reads it back."""

    def write_and_read(keys: Keys | None = None, tensors: Tensors | None = None) -> ModelFile:
        keys = small_keys() if keys is None else keys
        tensors = small_tensors() if tensors is None else tensors
        return read_model(write_gguf(tmp_path / "model.gguf", keys, tensors))

    return write_and_read


def roles(model: ModelFile) -> dict[tuple[str, str, int], str]:
    return {(s.role.stack, s.role.field, s.role.slot): s.name for s in model.sources}


def test_the_keys_become_the_configuration(read: Write):
    assert read().config == Qwen35Config(
        num_layers=2,
        hidden=8,
        ffn=12,
        vocab=24,
        vocab_used=24,
        heads=2,
        kv_heads=1,
        head_width=8,
        rotary=4,
        rope_theta=1e7,
        key_heads=1,
        value_heads=2,
        gdn_width=4,
        conv_taps=4,
        eps=float(np.float32(1e-6)),
        recurrent=(True, False),
        has_mtp=False,
        context=512,
    )


def test_every_tensor_goes_to_one_place_in_the_weights(read: Write):
    keys = small_keys(block_count=U32(5), nextn_predict_layers=U32(1))
    model = read(keys, small_tensors(mtp=True, kinds="dada"))
    places = roles(model)
    assert len(places) == len(model.sources) == len(model.file.tensors)
    assert places["deltanet", "decay", 1] == "blk.2.ssm_a"
    assert places["attention", "q", 1] == "blk.3.attn_q.weight"
    assert places["ffn", "norm", 3] == "blk.3.post_attention_norm.weight"
    assert places["mtp.attention", "out", 0] == "blk.4.attn_output.weight"
    assert places["mtp", "join", 0] == "blk.4.nextn.eh_proj.weight"
    assert places["global", "head", 0] == "output.weight" and not model.tied_head
    packed = {s.name for s in model.sources if s.role.packed}
    assert packed == {
        name
        for name, record in model.file.tensors.items()
        if len(record.shape) == 2 and "conv1d" not in name
    }


def test_each_role_is_a_field_of_the_weights_classes():
    weights = pytest.importorskip("openjet_jax.weights")
    classes = {
        "global": weights.Qwen35Weights,
        "deltanet": weights.DeltaNetWeights,
        "attention": weights.AttentionWeights,
        "mtp.attention": weights.AttentionWeights,
        "ffn": weights.FeedForwardWeights,
        "mtp.ffn": weights.FeedForwardWeights,
        "mtp": weights.Qwen35MtpWeights,
    }
    inner = {"deltanet", "attention", "ffn", "mtp", "draft", "kernels"}
    found = collections.defaultdict(set)
    for tensor in expected_tensors(published(num_layers=4, has_mtp=True)):
        found[tensor.role.stack].add(tensor.role.field)
    for stack, fields in found.items():
        assert fields == {field.name for field in dataclasses.fields(classes[stack])} - inner, stack


def published(**changes: Any) -> Qwen35Config:
    """Returns the configuration of the 27B model, with changes."""
    layers = changes.get("num_layers", 64)
    sizes: dict[str, Any] = {
        "num_layers": layers,
        "hidden": 5120,
        "ffn": 17408,
        "vocab": 248320,
        "vocab_used": 248077,
        "heads": 24,
        "kv_heads": 4,
        "head_width": 256,
        "rotary": 64,
        "rope_theta": 1e7,
        "key_heads": 16,
        "value_heads": 48,
        "gdn_width": 128,
        "conv_taps": 4,
        "eps": 1e-6,
        "recurrent": tuple((i + 1) % 4 != 0 for i in range(layers)),
        "has_mtp": False,
        "context": 262144,
    }
    return Qwen35Config(**(sizes | changes))


@pytest.mark.parametrize(
    ("changes", "tensors", "parameters"),
    [
        ({}, 851, 26_895_998_464),
        ({"has_mtp": True}, 866, 26_895_998_464 + 424_699_392),
        (
            {
                "num_layers": 32,
                "hidden": 4096,
                "ffn": 12288,
                "heads": 16,
                "value_heads": 32,
            },
            427,
            8_953_803_264,
        ),
    ],
)
def test_published_sizes_have_the_published_tensors_and_parameters(
    changes: dict, tensors: int, parameters: int
):
    expected = [
        tensor
        for tensor in expected_tensors(published(**changes))
        if tensor.role.stack != "mtp" or tensor.role.field not in ("embedding", "head")
    ]
    assert len(expected) == tensors
    assert sum(int(np.prod(tensor.shape)) for tensor in expected) == parameters


def test_an_absent_output_matrix_ties_the_head_to_the_embedding(read: Write):
    tensors = small_tensors()
    del tensors["output.weight"]
    model = read(tensors=tensors)
    assert model.tied_head and ("global", "head", 0) not in roles(model)


def test_a_list_of_recurrent_layers_overrides_the_interval(read: Write):
    keys = small_keys(attention__recurrent_layers=[False, True])
    assert read(keys, small_tensors(kinds="ad")).config.recurrent == (False, True)


def test_the_mtp_entry_of_recurrent_layers_is_not_a_layer(read: Write):
    keys = small_keys(
        block_count=U32(3),
        nextn_predict_layers=U32(1),
        attention__recurrent_layers=[True, False, True],
    )
    model = read(keys, small_tensors(mtp=True))
    assert model.config.recurrent == (True, False) and model.config.has_mtp


def test_without_an_interval_every_fourth_layer_is_full_attention(read: Write):
    keys = small_keys(block_count=U32(5), full_attention_interval=None)
    assert read(keys, small_tensors(kinds="dddad")).config.attention_layers == (3,)


@pytest.mark.parametrize("kinds", ["dd", "aa"])
def test_a_model_may_have_layers_of_one_kind_only(read: Write, kinds: str):
    interval = U32(1 if kinds == "aa" else 9)
    model = read(small_keys(full_attention_interval=interval), small_tensors(kinds=kinds))
    assert model.config.recurrent == (kinds == "dd",) * 2


def test_sizes_given_for_every_layer_are_accepted_when_equal(read: Write):
    keys = small_keys(attention__head_count=[2, 2], feed_forward_length=[12, 12])
    assert read(keys).config.heads == 2
    with pytest.raises(GGUFError, match="feed_forward_length differs between layers"):
        read(small_keys(feed_forward_length=[12, 16]))


@pytest.mark.parametrize(
    "name",
    [
        "attention.key_length",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.dimension_sections",
        "context_length",
        "feed_forward_length",
        "ssm.inner_size",
        "ssm.conv_kernel",
    ],
)
def test_a_key_whose_default_would_be_wrong_is_required(read: Write, name: str):
    with pytest.raises(GGUFError, match=f"qwen35.{name} is missing"):
        read(small_keys() | {f"qwen35.{name}": None})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rope.scaling.type", "yarn", "only 'none' is"),
        ("rope.scaling.factor", 4.0, "only 0.0 or 1.0 is"),
        ("rope.scaling.yarn_log_multiplier", 0.1, "could change the arithmetic"),
        ("rope.freq_base_swa", 1e4, "could change the arithmetic"),
        ("attention.sliding_window", U32(4096), "only 0 is"),
        ("attention.scale", 0.5, r"only 1/sqrt\(8\) is"),
        ("attention.causal", False, "only True is"),
        ("attention.value_length", U32(16), "must equal head_width=8"),
        ("attention.layer_norm_rms_epsilon", -1e-6, "must be in 1e-30..1"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "must be finite"),
        ("attention.head_count_kv", U32(3), "must divide head_count=2"),
        ("attention.head_count", True, "must be an integer"),
        ("rope.freq_base", 0.5, "must be at least 1"),
        ("rope.freq_base", "big", "must be a number"),
        ("rope.dimension_count", U32(10), "must be even and at most head_width=8"),
        ("rope.dimension_sections", [2, 0, 0, 0], "leaves pair 1 of 2"),
        ("rope.dimension_sections", [1, 1], "3 or 4 counts"),
        ("rope.dimension_sections", "all", "must be an array"),
        ("attention.recurrent_layers", [True], "has 1 entries"),
        ("attention.recurrent_layers", ["yes", "no"], "must be an array"),
        ("ssm.conv_kernel", U32(1), "must be in 2"),
        ("ssm.unheard_of", 1, "could change the arithmetic"),
        ("final_logit_softcapping", 30.0, "only 0.0 is"),
        ("vocab_size", U32(23), "token_embd.weight has 24 rows"),
    ],
)
def test_a_key_that_asks_for_other_arithmetic_is_refused_by_name(
    read: Write, name: str, value: object, message: str
):
    with pytest.raises(GGUFError, match=f"qwen35.{name}.*{message}"):
        read(small_keys() | {f"qwen35.{name}": value})


def test_a_false_head_width_allocates_nothing_of_its_size(read: Write):
    huge = U32(2**31 - 2)
    keys = small_keys(attention__key_length=huge, rope__dimension_count=huge)
    with pytest.raises(GGUFError, match="leaves pair 2 of 1073741823"):
        read(keys)


@pytest.mark.parametrize("sections", [[11, 11, 10, 0], [11, 11, 10], [16, 16, 16, 16]])
def test_sections_that_give_every_pair_a_text_position_are_accepted(
    read: Write, sections: list[int]
):
    tensors = small_tensors()
    widths = {"q": (256, 8), "k": (64, 8), "v": (64, 8), "output": (8, 128)}
    for name, shape in widths.items():
        tensors[f"blk.1.attn_{name}.weight"] = np.ones(shape, np.float32)
    for name in "qk":
        tensors[f"blk.1.attn_{name}_norm.weight"] = np.ones(64, np.float32)
    keys = small_keys(
        attention__key_length=U32(64),
        rope__dimension_count=U32(64),
        rope__dimension_sections=sections,
    )
    assert read(keys, tensors).config.rotary == 64
    keys["qwen35.rope.dimension_sections"] = [11, 10, 10, 1]
    with pytest.raises(GGUFError, match="leaves pair 31 of 32"):
        read(keys, tensors)


def test_neutral_values_of_such_keys_are_accepted(read: Write):
    keys = small_keys(
        rope__scaling__type="none",
        rope__scaling__factor=4.0,
        rope__scaling__yarn_log_multiplier=0.1,
        rope__scaling__original_context_length=U32(512),
        attention__scale=8**-0.5,
        attention__causal=True,
        vocab_size=U32(24),
    )
    assert read(keys).notes == ()


def test_another_key_is_noted(read: Write):
    assert "qwen35.colour is not known" in read(small_keys(colour="blue")).notes[0]


def vocabulary(types: list[int]) -> dict[str, Any]:
    tokens = [f"t{i}" for i in range(len(types))]
    return small_keys() | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }


def test_trailing_unused_tokens_are_padding(read: Write):
    config = read(vocabulary([1] * 10 + [5] * 2 + [3] * 4 + [5] * 8)).config
    assert (config.vocab, config.vocab_used) == (24, 16)


def test_token_tables_that_do_not_fit_the_embedding_are_refused(read: Write):
    with pytest.raises(GGUFError, match="has 23 tokens.*24 rows"):
        read(vocabulary([1] * 23))
    with pytest.raises(GGUFError, match="marks all 24 tokens as unused"):
        read(vocabulary([5] * 24))
    with pytest.raises(GGUFError, match="token_type must be 24 integers"):
        read(vocabulary([1] * 24) | {"tokenizer.ggml.token_type": [1]})


def mtp_keys(count: int = 3, declared: int | None = 1) -> Keys:
    return small_keys(
        block_count=U32(count), nextn_predict_layers=None if declared is None else U32(declared)
    )


def test_a_file_of_the_mtp_block_alone_is_refused_with_the_reason(read: Write):
    tensors = {
        name: tensor
        for name, tensor in small_tensors(mtp=True).items()
        if not name.startswith(("blk.0", "blk.1"))
    }
    with pytest.raises(GGUFError, match="holds the MTP block alone"):
        read(mtp_keys(), tensors)


def test_nextn_tensors_outside_the_last_block_are_refused(read: Write):
    with pytest.raises(GGUFError, match="nextn.*blk.2, not in the last block"):
        read(mtp_keys(4), small_tensors(mtp=True))


def test_a_last_block_that_may_be_a_layer_or_half_an_mtp_block_is_refused(read: Write):
    with pytest.raises(GGUFError, match="a layer or half an MTP block"):
        read(mtp_keys(2), small_tensors())


def test_an_mtp_block_may_bring_its_own_embedding_and_head_and_lack_its_final_norm(read: Write):
    tensors = small_tensors(mtp=True)
    for name in ("embed_tokens", "shared_head_head"):
        tensors[f"blk.2.nextn.{name}.weight"] = np.ones((24, 8), np.float32)
    del tensors["blk.2.nextn.shared_head_norm.weight"]
    model = read(mtp_keys(), tensors)
    places = roles(model)
    assert places["mtp", "embedding", 0] == "blk.2.nextn.embed_tokens.weight"
    assert places["mtp", "head", 0] == "blk.2.nextn.shared_head_head.weight"
    assert places["mtp", "head_norm", 0] == "output_norm.weight"
    assert "output_norm stands in" in model.notes[0]


def test_a_fused_qkv_of_an_attention_layer_is_split_by_rows(read: Write):
    tensors = small_tensors(mtp=True)
    parts = {}
    for block in (1, 2):
        parts[block] = [tensors.pop(f"blk.{block}.attn_{n}.weight") for n in "qkv"]
        tensors[f"blk.{block}.attn_qkv.weight"] = np.concatenate(parts[block])
    model = read(mtp_keys(), tensors)
    sources = {(s.role.stack, s.role.field): s for s in model.sources}
    for block, stack in ((1, "attention"), (2, "mtp.attention")):
        for field, part in zip("qkv", parts[block], strict=True):
            source = sources[stack, field]
            assert source.shape == part.shape and source.nbytes == part.nbytes
            np.testing.assert_array_equal(source.data.view(np.float32), part)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.attn_q.weight", (4, 8), "unexpected tensor 'blk.0.attn_q.weight'"),
        ("blk.1.attn_qkv.weight", (48, 8), "unexpected tensor 'blk.1.attn_qkv.weight'"),
        ("blk.1.attn_q.scale", (1,), "NVFP4 scales are not supported"),
        ("rope_freqs.weight", (2,), "unexpected tensor 'rope_freqs.weight'"),
        ("blk.7.attn_q.weight", (4, 8), "unexpected block, blk.7"),
        ("blk.00001.attn_q.weight", (4, 8), "unexpected tensor 'blk.00001.attn_q.weight'"),
        ("ssm_norm.weight", (8,), "unexpected"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    read: Write, name: str, shape: tuple[int, ...], message: str
):
    with pytest.raises(GGUFError, match=message):
        read(tensors=small_tensors() | {name: np.ones(shape, np.float32)})


def test_every_missing_tensor_is_named_up_to_four(read: Write):
    tensors = small_tensors()
    for name in [name for name in tensors if name.startswith("blk.1.attn")][:6]:
        del tensors[name]
    with pytest.raises(GGUFError, match="missing tensors 'blk.1.attn_.*and 2 more"):
        read(tensors=tensors)


def test_norms_and_taps_may_be_half_floats_but_not_integers(read: Write):
    tensors = small_tensors()
    for name in ("blk.0.ssm_conv1d.weight", "blk.0.ssm_a", "output_norm.weight"):
        tensors[name] = tensors[name].astype(np.float16)
    assert read(tensors=tensors).sources
    for name, allowed in (("output_norm.weight", "F32, F16 or BF16"), ("output.weight", "packed")):
        damaged = small_tensors()
        damaged[name] = damaged[name].astype(np.int32)
        with pytest.raises(GGUFError, match=f"{name}' has type I32.*{allowed}"):
            read(tensors=damaged)


def test_what_the_file_says_of_itself_is_kept(read: Write):
    keys = small_keys() | {
        "general.name": "small",
        "general.file_type": U32(15),
        "general.quantized_by": "someone",
        "general.sampling.top_k": 20,
        "general.sampling.temp": 0.5,
        "general.tags": ["x"],
    }
    assert read(keys).facts == {
        "name": "small",
        "quantized_by": "someone",
        "file_type": "Q4_K_M",
        "sampling": {"top_k": 20, "temp": 0.5},
    }
    assert (
        read(small_keys() | {"general.file_type": U32(999)}).facts["file_type"] == "unknown (999)"
    )


VALUES = st.one_of(
    st.integers(0, 40).map(U32),
    st.sampled_from([U32(2**32 - 1), U32(2**31), -1, 0]),
    st.floats(width=32),
    st.text(st.characters(codec="utf-8"), max_size=4),
    st.booleans(),
    st.lists(st.integers(-2, 9), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.text("ab", max_size=2), min_size=1, max_size=3),
)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(small_keys())[1:]), VALUES, min_size=1, max_size=3
    )
)
def test_any_value_of_any_key_is_understood_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: Keys
):
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    write_gguf(path, small_keys() | dict(changes), small_tensors())
    try:
        config = read_model(path).config
    except GGUFError as error:
        assert str(error).startswith(str(path))
    else:
        assert isinstance(config, Qwen35Config)
