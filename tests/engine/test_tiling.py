"""Projections in the kernels' order: those that become one matrix give what they gave apart.

The kernel is replaced by the model of a warp, so results are compared bit for bit.
"""

import functools
import shutil
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import relative_rms

from openjet_jax import drafting_weights, placing, stacks, tiling
from openjet_jax.architectures import initial_state
from openjet_jax.checkpoint import DamagedCheckpoint, read_config
from openjet_jax.config import DecodeConfig
from openjet_jax.cycle import cycle
from openjet_jax.draft_vocabulary import empty_slots
from openjet_jax.layers import add_and_norm, rms_norm
from openjet_jax.loading import load
from openjet_jax.prefill import prefill
from openjet_jax.projections import LayerInput, gated, project, project_each
from openjet_jax.settings import SamplingKind
from openjet_jax.weights import (
    AttentionWeights,
    DeltaNetWeights,
    FeedForwardWeights,
    Packed,
    Tiled,
    Within,
)
from pallas_kernels import decode_inputs, decode_product, tile_choice
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Tiles, default_tiles
from pallas_kernels.formats import FORMATS
from pallas_kernels.tile_choice import Product, Winner
from tests.kernels import warp_model

K, LAYERS = 256, 2


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(decode_product, "decode_product", warp_model.decode_product)
    monkeypatch.setattr(decode_inputs, "decode_inputs", decode_inputs.decode_inputs_reference)


def packed(rows, *formats, seed=0, k=K):
    """Returns a random projection with these formats of its layers."""
    rng, stacks, names = np.random.default_rng(seed), [], list(dict.fromkeys(formats))
    for name in names:
        planes = {}
        for plane, spec in FORMATS[name].plane_specs(rows, k).items():
            shape = (formats.count(name), *spec.shape)
            if jnp.issubdtype(spec.dtype, jnp.floating):
                values = rng.normal(0, 1e-2, shape).astype(spec.dtype)
            else:
                limit = 64 if plane in ("scales", "mins") else 256
                values = rng.integers(0, limit, shape).astype(np.uint8).view(spec.dtype)
            planes[plane] = jnp.asarray(values)
        stacks.append(planes)
    table = tuple((names.index(name), formats[:i].count(name)) for i, name in enumerate(formats))
    return Packed(stacks=tuple(stacks), formats=tuple(names), table=table, shape=(rows, k))


def apart(weight):
    return tiling.tiled(jax.tree.map(jnp.copy, weight), keep_rows=False)


def attention(q, k, v):
    ones = jnp.ones((LAYERS, 1))
    out = packed(16, "q4_k", "q4_k")
    return AttentionWeights(norm=None, q=q, k=k, v=v, out=out, q_norm=ones, k_norm=ones)


def joined(module) -> dict[str, Any]:
    changed = tiling._joined(jax.tree.map(jnp.copy, module))
    return {
        name: tiling.tiled(weight, keep_rows=False) if isinstance(weight, Packed) else weight
        for name, weight in changed.items()
    }


def rows(seed=5):
    x = np.random.default_rng(seed).normal(size=(8, K)).astype(np.float32)
    x[:, 3] *= 1000
    return jnp.asarray(x)


@pytest.mark.parametrize("name", BLOCKS)
def test_gates_paired_with_what_they_multiply_give_the_same_bits(name):
    gate, up = packed(32, name, name, seed=1), packed(32, name, name, seed=2)
    weights = FeedForwardWeights(norm=jnp.ones((2, K)), gate=gate, up=up, down=packed(16, name))
    pair = joined(weights)
    assert pair["gate"].paired
    assert isinstance(pair["up"], Within)
    for layer in range(LAYERS):
        got = gated(rows(), pair["gate"], pair["up"], layer)
        alone = (np.asarray(project(rows(), apart(part), layer)) for part in (gate, up))
        want = warp_model.silu(next(alone)) * next(alone)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_projections_below_one_another_give_the_same_bits(skip):
    parts = [packed(n, "q4_k", "q4_k", seed=n) for n in (48, 16, 32)]
    one = joined(attention(*parts))
    assert one["q"].parts == (48, 16, 32) and isinstance(one["v"], Within)
    got = project_each(rows(), (one["q"], one["k"], one["v"]), 1, skip=skip)
    want = project_each(rows(), [apart(part) for part in parts], 1, skip=skip)
    assert len(got) == 3 - skip
    for a, b in zip(got, want, strict=True):
        assert jnp.array_equal(a, b)


def test_layers_of_several_formats_join_where_all_of_them_agree():
    formats = ("q4_k", "q6_k")
    q, k, v = packed(32, *formats), packed(16, *formats), packed(16, "q6_k", "q6_k")
    one = joined(attention(q, k, v))
    assert one["q"].parts == (32, 16) and "v" not in one
    v = apart(v)
    for layer in range(LAYERS):
        got = project_each(rows(), (one["q"], one["k"], v), layer)
        want = project_each(rows(), (apart(q), apart(k), v), layer)
        assert all(jnp.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_small_projections_that_no_kernel_reads_become_one_packed_matrix():
    qkv, gate = packed(32, "q4_k", "q4_k"), packed(16, "q6_k", "q6_k")
    alpha, beta = packed(4, "f32", "f32", seed=1), packed(4, "f32", "f32", seed=2)
    ones = jnp.ones((LAYERS, 4))
    weights = DeltaNetWeights(
        norm=None,
        qkv=qkv,
        gate=gate,
        alpha=alpha,
        beta=beta,
        conv=jnp.ones((LAYERS, 4, 4)),
        dt_bias=ones,
        decay=ones,
        gate_norm=ones,
        out=packed(16, "q4_k", "q4_k"),
    )
    one = joined(weights)
    assert set(one) == {"alpha", "beta"} and isinstance(one["alpha"], Packed)
    together = (apart(qkv), apart(gate), one["alpha"], one["beta"])
    *_, a, b = project_each(rows(), together, 1)
    np.testing.assert_allclose(a, project(rows(), alpha, 1), rtol=1e-5)
    np.testing.assert_allclose(b, project(rows(), beta, 1), rtol=1e-5)


@pytest.mark.parametrize("skip", [0, 1])
def test_projections_too_small_for_a_kernel_may_be_large_enough_together(skip):
    parts = [packed(8, "q8_0", "q8_0", seed=n) for n in range(4)]
    one = joined(attention(*parts[:3]))
    assert one["q"].parts == (8, 8, 8)
    pair = joined(attention(packed(32, "q8_0", "q8_0"), *parts[:2]))
    assert isinstance(pair["k"], Tiled) and pair["k"].parts == (8, 8) and "q" not in pair
    together = (apart(packed(32, "q8_0", "q8_0")), pair["k"], pair["v"])
    outputs = project_each(rows(), together, 1, skip=1 + skip)
    for got, part in zip(outputs, parts[skip:2], strict=True):
        assert relative_rms(got, project(rows(), part, 1)) < 1e-3


def test_a_part_of_another_matrix_is_refused_alone():
    with pytest.raises(ValueError, match="use project_each"):
        project(rows(), Within())


@pytest.mark.parametrize("name", BLOCKS)
def test_a_joined_matrix_is_cut_along_k_as_its_parts_are(name):
    block = BLOCKS[name]
    for k, *outputs in ((5120, 12288, 1024, 1024), (5120, 10240, 6144), (5120, 17408, 17408)):
        cuts = {default_tiles(block, n, k).parts for n in (*outputs, sum(outputs))}
        assert len(cuts) == 1


def test_a_product_goes_through_its_winner_on_this_device(monkeypatch):
    product = Product(block="q4_k", outputs=32, k=K, rows=8, epilogue="none")
    winner = Winner(
        product=product, tiles=Tiles(stages=3), us=1.0, default_us=2.0, commit=None, date=""
    )
    asked, taken = [], []

    def winners_on(device):
        asked.append(device)
        return {product: winner}

    def watched(x, weights, layer, block, tiles, *rest, **more):
        taken.append(tiles)
        return warp_model.decode_product(x, weights, layer, block, tiles, *rest, **more)

    monkeypatch.setattr(tile_choice, "winners_on", winners_on)
    monkeypatch.setattr(decode_product, "decode_product", watched)
    for count in (32, 48):
        project(rows(), apart(packed(count, "q4_k", "q4_k")), 1)
    assert taken == [Tiles(stages=3, overlap=True), Tiles(overlap=True)]
    assert set(asked) == {jax.devices()[0].device_kind}


def test_tiled_projections_alone_are_as_before():
    weight = packed(32, "q5_k", "q5_k")
    tiled = apart(weight)
    assert isinstance(tiled, Tiled) and tiled.parts == ()
    assert relative_rms(project(rows(), tiled, 1), project(rows(), weight, 1)) < 1e-3


def test_every_format_but_dense_ones_has_a_kind_of_block():
    assert FORMATS.keys() - BLOCKS.keys() == {"f32", "f16", "bf16"}


@pytest.mark.parametrize("names", [("q4_0", "q4_1"), ("iq4_xs", "q5_k"), ("mxfp4", "q2_k")])
def test_layers_of_any_packed_formats_are_multiplied_by_the_kernels(names):
    weight = packed(32, *names)
    tiled = apart(weight)
    assert isinstance(tiled, Tiled) and tiled.formats == names
    for layer in range(LAYERS):
        assert relative_rms(project(rows(), tiled, layer), project(rows(), weight, layer)) < 1e-3


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_1", "iq4_nl", "mxfp4", "nvfp4"])
def test_rows_that_are_no_whole_blocks_stay_packed(name):
    for weight in (packed(32, name, k=288), packed(24, name)):
        assert isinstance(apart(weight), Packed)


@pytest.mark.parametrize("second", ["q5_k", "q6_k", "q4_0", "iq4_xs"])
def test_rows_prepared_once_give_what_rows_prepared_for_each_product_do(second):
    first, other = apart(packed(32, "q4_k", "q4_k")), apart(packed(16, second, second))
    x, added = rows(), rows(6) / 1000
    norm = jnp.asarray(np.random.default_rng(0).normal(1, 0.1, (LAYERS, K)).astype(np.float32))
    stream, h = add_and_norm(x, added, norm, 1, 1e-6, (first, other))
    assert isinstance(h, LayerInput) and jnp.array_equal(stream, x + added)
    got = project_each(h, (first, other), 1)
    want = project_each(rms_norm(x + added, norm[1], 1e-6), (first, other), 1)
    assert all(jnp.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("values", "ahead"), [(placing.PIECE_VALUES, 2**29), (2**17, 1)])
@pytest.mark.parametrize("vocab", [None, 512])
def test_weights_that_are_tiled_as_they_are_read_are_the_same(values, ahead, vocab, monkeypatch):
    monkeypatch.setattr(tiling, "PIECE_VALUES", values)
    monkeypatch.setattr(stacks, "READ_AHEAD_BYTES", ahead)
    model = load("tiny", backend="reference", draft_vocab=vocab)
    config = read_config(model.directory)
    got = drafting_weights.load_tiled(model.directory, config, model.draft)
    want = tiling.tiled_weights(model.weights)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert isinstance(got.head, Tiled) and (got.head.packed is None) == (vocab is None)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [(name, kind) for kind in ("qwen35", "qwen4exp") for name in golden.names(kind)],
)
def test_golden_models_that_are_tiled_as_they_are_read_are_the_same(name, architecture):
    case, directory = golden.case(name, architecture), golden.checkpoint_of(name, architecture)
    got = drafting_weights.load_tiled(directory, read_config(directory), None)
    want = tiling.tiled_weights(jax.tree.map(jnp.copy, case.weights))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_programs_are_compiled_for_the_default_device_of_who_loads():
    class Lowered:
        def compile(self):
            return jax.config.jax_default_device

    plan = placing.Planning()
    plan.programs["program"] = Lowered
    device = jax.devices()[0]
    with jax.default_device(device), placing.Sending(None, None, plan) as sending:
        assert sending._programs["program"].result() == device


def test_a_damaged_leaf_is_found_while_it_is_tiled(tmp_path):
    model = load("tiny", backend="reference")
    shutil.copytree(model.directory, tmp_path / "tiny")
    (leaf,) = (tmp_path / "tiny/weights/blk.3/ffn.down.codes").glob("0*")
    data = bytearray(leaf.read_bytes())
    data[1000] ^= 4
    leaf.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="ffn.down.codes"):
        drafting_weights.load_tiled(tmp_path / "tiny", read_config(tmp_path / "tiny"), model.draft)


@pytest.mark.parametrize(
    ("rows", "k", "paired", "step"),
    [
        ((17408, 17408), 5120, True, 8704),
        ((248320,), 5120, False, 24832),
        ((12288, 1024, 1024), 5120, False, None),
        ((5120,), 17408, False, None),
        ((16 * 131101,), 5120, False, 16),
    ],
)
def test_large_matrices_are_tiled_some_rows_at_a_time(rows, k, paired, step):
    assert tiling._rows_at_once(rows, k, paired) == step


@pytest.fixture(scope="module")
def tiny():
    model = load("tiny", backend="reference")
    return model.config, tiling.tiled_weights(model.weights)


def lowered_cycle(tiny, kind):
    """Returns the text of one cycle's program for a GPU, and its cycle's result."""
    config, weights = tiny
    decode = DecodeConfig(context=256)
    state = jax.eval_shape(lambda w: initial_state(config, decode, empty_slots(w)), weights)
    run = functools.partial(cycle, config=config, kind=kind, max_depth=3)
    return jax.jit(run).trace(weights, state).lower(lowering_platforms=("cuda",)).as_text()


def test_a_cycle_of_the_bundled_model_takes_few_products_a_layer(tiny, monkeypatch):
    monkeypatch.undo()
    text = lowered_cycle(tiny, SamplingKind())
    # Three runs of a loop body (DeltaNet, attention, the MTP block), and two heads. q and k, and
    # gate and up, are one product each; v, down and DeltaNet's first projection are of two formats.
    assert text.count("decode_product_q4_k_kernel") + text.count("decode_product_q6_k_kernel") <= 42
    assert tiny[1].ffn.gate.paired and tiny[1].attention.q.parts == (1024, 256)


def test_a_prompt_of_the_bundled_model_takes_the_kernels_of_its_deltanet_layers(tiny, monkeypatch):
    monkeypatch.undo()
    config, weights = tiny
    decode = DecodeConfig(context=256)
    state = jax.eval_shape(lambda w: initial_state(config, decode, empty_slots(w)), weights)
    tokens, count = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((65,), ()))
    program = jax.jit(functools.partial(prefill, config=config))
    text = program.trace(weights, state, tokens, count).lower(lowering_platforms=("cuda",))
    assert all(
        f"gdn_prefill_{part}_kernel" in text.as_text() for part in ("rows", "mix", "scan", "norm")
    )
