"""A prompt's Gated DeltaNet layer: its kernels in a model of the grid, and on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from pallas_kernels.deltanet_layer import (
    Inputs,
    Memory,
    Parameters,
    Sizes,
    gdn_prefill_reference,
)
from tests.kernels.bulk_model import run

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from bench.deltanet import GDN_SIZES, gdn_operands, gdn_sizes  # noqa: E402
from pallas_kernels import deltanet_prefill, deltanet_rows  # noqa: E402
from pallas_kernels.deltanet_chunks import SPLITS, THREADS, value_offset  # noqa: E402
from pallas_kernels.deltanet_prefill import fits, gdn_prefill  # noqa: E402

kernel: Any = gdn_prefill
reference = jax.jit(gdn_prefill_reference, static_argnums=7)
LAYERS = 2


class Ref:
    """A reference that a modelled kernel writes to."""

    def __init__(self, value):
        self.value = np.array(value)


@pytest.fixture
def model(monkeypatch):
    """Returns `gdn_prefill` with its kernels run by the model of a grid."""

    def call(kernel, out_type, *, grid, shared, **_):
        (shared_bytes,), (_, plan) = shared, kernel.args
        outs = out_type if isinstance(out_type, list) else [out_type]

        def body(isa, *refs):
            kernel.func(isa, plan, *refs)

        def launch(*operands):
            arrays = [x.value if isinstance(x, Ref) else np.array(x) for x in operands]
            # What is not written holds NaN, and whatever is read of it shows.
            blank = [np.full(o.shape, 0x7FC00001, np.uint32).view(o.dtype) for o in outs]
            after = run(body, grid, THREADS, shared_bytes, *arrays, *blank)
            for operand, value in zip(operands, after, strict=False):
                if isinstance(operand, Ref):
                    operand.value = value
            results = [jnp.asarray(x) for x in after[len(operands) :]]
            return results if isinstance(out_type, list) else results[0]

        return launch

    for module in (deltanet_prefill, deltanet_rows):
        monkeypatch.setattr(module, "lane_kernel", call)
    monkeypatch.setattr(jax, "new_ref", Ref)
    monkeypatch.setattr(jax, "freeze", lambda ref: jnp.asarray(ref.value))
    return gdn_prefill


def error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2)) / max(np.sqrt(np.mean(want**2)), 1e-30))


def assert_agrees(run, sizes: Sizes, counts: tuple[int, int, int, int], limit: float) -> None:
    """Compares with the reference in float32; dead rows and rejected pending ones hold NaN.

    Args:
      run: the layer.
      sizes: of the layer.
      counts: rows, start of the history, pending rows, live rows.
      limit: largest relative RMS error of states, and a quarter of that of outputs.
    """
    rows, start, num_pending, num_live = counts
    x, parameters, memory = gdn_operands(sizes, LAYERS, jax.random.key(0), rows)
    at = [jnp.int32(n) for n in (1, start, num_pending, num_live)]
    wanted, wanted_memory = reference(x, parameters, memory, *at, sizes)
    spoiled = Memory(
        delta=memory.delta,
        window=memory.window,
        pending=jax.tree.map(lambda p: p.at[:, num_pending:].set(jnp.nan), memory.pending),
    )
    x = Inputs(
        u=x.u.at[num_live:].set(jnp.nan),
        z=x.z,
        a=x.a.at[num_live:].set(jnp.nan),
        b=x.b.at[num_live:].set(jnp.nan),
    )
    out, after = run(x, parameters, spoiled, *at, sizes)
    assert np.all(np.asarray(out)[num_live:] == 0)
    assert error(out, wanted) < 4 * limit
    assert error(after.delta, wanted_memory.delta) < limit
    np.testing.assert_array_equal(after.window, wanted_memory.window)
    for got, want in zip(
        jax.tree.leaves(after.pending), jax.tree.leaves(spoiled.pending), strict=True
    ):
        np.testing.assert_array_equal(got, want)


COUNTS = [(64, 2, 3, 50), (128, 0, 0, 128), (64, 8, 8, 1), (192, 1, 2, 65), (64, 1, 2, 0)]


@pytest.mark.parametrize("counts", COUNTS)
def test_a_layer_agrees_with_its_reference(model, counts):
    assert_agrees(model, gdn_sizes(1, 1), counts, 5e-6)


@pytest.mark.parametrize(
    "sizes",
    [gdn_sizes(2, 3), gdn_sizes(1, 2), gdn_sizes(1, 4), gdn_sizes(3, 1, gate="sigmoid", eps=1e-3)],
    ids=str,
)
def test_a_layer_agrees_whatever_its_heads(model, sizes):
    assert_agrees(model, sizes, (128, 3, 5, 127), 5e-6)


@pytest.mark.parametrize("first", [0, 4, 3])
def test_projections_are_read_where_they_stand_in_a_wider_matrix(model, first):
    sizes = gdn_sizes(1, 2)
    x, parameters, memory = gdn_operands(sizes, LAYERS, jax.random.key(0), 64)
    at = [jnp.int32(n) for n in (1, 2, 3, 60)]
    wanted, after = model(x, parameters, memory, *at, sizes)
    fields = [x.u, x.z, x.a, x.b]
    # A row has a multiple of four columns, so that u can be read by fours where it is aligned.
    nothing = [jnp.full((64, first), jnp.nan), jnp.full((64, -(first + 4) % 4 + 4), jnp.nan)]
    matrix = jnp.concatenate([nothing[0], *fields, nothing[1]], axis=1)
    ends = np.cumsum([first, *(field.shape[1] for field in fields)])
    wide = Inputs(*[matrix] * 4)
    got = model(wide, parameters, memory, *at, sizes, first=tuple(int(n) for n in ends[:4]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((wanted, after)), strict=True):
        np.testing.assert_array_equal(a, b)


def in_float64(x: Inputs, parameters: Parameters, memory: Memory, layer: int, sizes: Sizes):
    """Returns gated outputs and states of the layer's own lines, one row after another."""
    x, parameters, memory = (
        jax.tree.map(lambda a: np.asarray(a, np.float64), tree) for tree in (x, parameters, memory)
    )
    heads, width, keys = sizes.value_heads, sizes.width, sizes.key_heads
    joined = np.concatenate([memory.window[layer, : sizes.history], x.u])
    taps = parameters.conv[layer]
    mixed = sum(taps[:, j] * joined[j : j + len(x.u)] for j in range(sizes.taps))
    mixed = (mixed * expit(mixed)).reshape(len(x.u), -1, width)
    q, k, v = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
    q, k = (y / np.sqrt(np.sum(y * y, -1, keepdims=True) + sizes.eps) for y in (q, k))
    g = parameters.decay[layer] * np.logaddexp(0, x.a + parameters.dt_bias[layer])
    beta, spread = expit(x.b), np.arange(heads) % keys
    state, outs = memory.delta[layer].copy(), np.zeros((len(x.u), heads, width))
    for i in range(len(x.u)):
        key, query = k[i, spread], q[i, spread] / np.sqrt(width)
        state *= np.exp(g[i])[:, None, None]
        read = np.einsum("hd,hde->he", key, state)
        state += key[:, :, None] * (beta[i][:, None] * (v[i] - read))[:, None]
        outs[i] = np.einsum("hd,hde->he", query, state)
    scale = 1 / np.sqrt(np.mean(outs * outs, -1, keepdims=True) + sizes.eps)
    z = x.z.reshape(outs.shape)
    gated = outs * scale * parameters.norm[layer] * z * expit(z)
    return gated.reshape(x.z.shape), state


def hard_operands(rows: int, keys: str, decay: str):
    """Returns operands whose keys repeat, written with full strength, under some decay.

    Args:
      rows: of the prompt.
      keys: random, equal, alternating, or close to one another.
      decay: random, none (exp(g) near 1), all (g near -40), or one of the two at random.
    """
    sizes = gdn_sizes(1, 1)
    x, parameters, memory = gdn_operands(sizes, 1, jax.random.key(3), -(-rows // 64) * 64)
    rng = np.random.default_rng(0)
    u, b = np.array(x.u), np.array(x.b)
    channels = slice(sizes.width, 2 * sizes.width)
    if keys != "random":
        b[:] = 12.0
        noise = rng.standard_normal(u[:, channels].shape)
        u[:, channels] = 4 * noise[0]
        if keys == "alternating":
            u[1::2, channels] = 4 * noise[1]
        elif keys == "close":
            u[:, channels] += 0.02 * noise
    gates = {
        "random": -rng.exponential(0.1, (len(u), 1)),
        "none": np.full((len(u), 1), -1e-5),
        "all": np.full((len(u), 1), -40.0),
        "mixed": np.where(rng.random((len(u), 1)) < 0.1, -40.0, -1e-3),
    }[decay]
    # softplus(a) = -g where decay is -1 and dt_bias is 0.
    a = np.log(np.expm1(-gates))
    x = Inputs(u=jnp.asarray(u), z=x.z, a=jnp.asarray(a, jnp.float32), b=jnp.asarray(b))
    # Taps that keep repeated inputs repeated.
    parameters = Parameters(
        conv=jnp.broadcast_to(jnp.array([0.1, -0.2, 0.3, 1.0]), parameters.conv.shape),
        dt_bias=jnp.zeros((1, 1)),
        decay=-jnp.ones((1, 1)),
        norm=parameters.norm,
    )
    return x, parameters, memory, sizes


def errors_in_float64(run, rows: int, keys: str, decay: str) -> tuple[float, float]:
    """Returns errors of outputs and of the state."""
    x, parameters, memory, sizes = hard_operands(rows, keys, decay)
    at = [jnp.int32(n) for n in (0, 0, 0, rows)]
    out, after = run(x, parameters, memory, *at, sizes)
    live = jax.tree.map(lambda leaf: leaf[:rows], x)
    wanted, state = in_float64(live, parameters, memory, 0, sizes)
    return error(out[:rows], wanted), error(after.delta[0], state)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 1000, 2048])
def test_any_length_is_near_single_steps_in_float64(model, rows):
    assert max(errors_in_float64(model, rows, "random", "random")) < 1e-5


@pytest.mark.parametrize("keys", ["equal", "alternating", "close"])
@pytest.mark.parametrize("decay", ["none", "all", "mixed"])
def test_hard_keys_and_decays_are_near_single_steps_in_float64(model, keys, decay):
    assert max(errors_in_float64(model, 256, keys, decay)) < 5e-5


def test_a_prompt_in_two_parts_is_the_prompt(model):
    x, parameters, memory, sizes = hard_operands(128, "random", "random")
    nothing = jnp.int32(0)
    whole, wanted = model(x, parameters, memory, nothing, nothing, nothing, jnp.int32(128), sizes)
    outs = []
    for part in (slice(0, 64), slice(64, 128)):
        rows = jax.tree.map(lambda leaf, part=part: leaf[part], x)
        at = [nothing, nothing, nothing, jnp.int32(64)]
        out, memory = model(rows, parameters, memory, *at, sizes)
        outs.append(out)
    # The state stays in float32 between chunks: nothing is rounded on the way.
    np.testing.assert_array_equal(np.concatenate(outs), whole)
    np.testing.assert_array_equal(memory.delta, wanted.delta)


def test_values_of_a_chunk_have_places_of_their_own():
    columns = 128 // SPLITS
    places = {value_offset(row, column) for row in range(64) for column in range(columns)}
    assert places == set(range(0, 64 * columns * 4, 4))


def test_a_layer_of_sizes_without_a_kernel_is_refused():
    for sizes in (gdn_sizes(2, 2, width=64), gdn_sizes(2, 2, taps=3), gdn_sizes(2, 5)):
        assert not fits(sizes)
        specs = jax.eval_shape(lambda s=sizes: gdn_operands(s, 1, jax.random.key(0), 64))
        with pytest.raises(ValueError, match="use gdn_prefill_reference"):
            jax.eval_shape(lambda *a, s=sizes: kernel(*a, 0, 0, 0, 0, s), *specs)


def test_rows_that_do_not_fill_chunks_are_refused():
    sizes = gdn_sizes(1, 1)
    for rows in (0, 63, 100):
        specs = jax.eval_shape(lambda n=rows: gdn_operands(sizes, 1, jax.random.key(0), n))
        with pytest.raises(ValueError, match="positive multiple of CHUNK=64; pad the rows"):
            jax.eval_shape(lambda *a: kernel(*a, 0, 0, 0, 0, sizes), *specs)


@pytest.mark.parametrize("sizes", GDN_SIZES, ids=str)
def test_a_layer_compiles_to_machine_code_without_spills(sizes, h200):
    from bench.compile_kernels import compile_gdn_prefill

    reports = compile_gdn_prefill(sizes, h200)
    assert len(reports) == 4
    assert all(report.spilled_bytes == 0 for report in reports)


def test_a_layer_lowers_for_a_gpu_on_a_host_without_one():
    sizes = gdn_sizes(16, 3)
    specs = jax.eval_shape(lambda: gdn_operands(sizes, LAYERS, jax.random.key(0), 128))
    at = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    lowered = jax.jit(lambda *a: kernel(*a, sizes)).trace(*specs, *at)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert all(f"gdn_prefill_{part}_kernel" in text for part in ("rows", "mix", "scan", "norm"))


CARD_LIMIT = 5e-5
"""Sums of a product on the tensor cores lose bits that float32 keeps: up to 2^-23 of each sum."""


@functools.cache
def compiled(sizes: Sizes):
    return jax.jit(functools.partial(kernel, sizes=sizes))


def on_card(*operands):
    *rest, sizes = operands
    return compiled(sizes)(*rest)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 1), (16, 2), (16, 3), (2, 4)])
def test_a_layer_is_right_on_the_card(heads):
    for counts in (*COUNTS, (2048, 3, 5, 2047)):
        assert_agrees(on_card, gdn_sizes(*heads), counts, CARD_LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 1000, 2048])
def test_any_length_is_near_single_steps_on_the_card(rows):
    assert max(errors_in_float64(on_card, rows, "random", "random")) < CARD_LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["equal", "alternating", "close"])
@pytest.mark.parametrize("decay", ["none", "all", "mixed"])
def test_hard_keys_and_decays_are_near_single_steps_on_the_card(keys, decay):
    for rows in (256, 2048):
        assert max(errors_in_float64(on_card, rows, keys, decay)) < 10 * CARD_LIMIT


@pytest.mark.gpu
def test_a_layer_has_the_same_bits_every_time_on_the_card():
    sizes = gdn_sizes(16, 3)
    operands = gdn_operands(sizes, LAYERS, jax.random.key(0), 2048)
    at = [jnp.int32(n) for n in (1, 2, 3, 2000)]
    first, *others = (jax.tree.leaves(on_card(*operands, *at, sizes)) for _ in range(4))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
