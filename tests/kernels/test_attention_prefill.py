"""Attention of a prompt's chunk: in a model of the warps of each block, and on a GPU."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openjet_jax import attention_layers, state
from pallas_kernels.attention import attention_reference
from pallas_kernels.cached_rows import Q8_0, Q8Rows, values
from tests.kernels.role_model import Barriers, Role, guard_stages, run_roles
from tests.kernels.test_attention_decode import spoiled

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from bench.attention import chunk_operands  # noqa: E402
from pallas_kernels import attention_prefill  # noqa: E402
from pallas_kernels.attention_panels import (  # noqa: E402
    TILE,
    TILE_BYTES,
    WIDTH,
    BfloatPanels,
    Q8Panels,
)
from pallas_kernels.attention_prefill import (  # noqa: E402
    FEWEST,
    HEADS,
    ROWS,
    STAGES,
    Places,
    Plan,
    attn_prefill,
    consume,
    fits,
    prepare_barriers,
    produce,
)

FORMATS = ["bfloat16", Q8_0]
LIMITS = {"bfloat16": 2e-3, Q8_0: 2.5e-3}
"""Largest relative RMS error: weights are rounded to bfloat16, 2^-9, and values in q8_0 are too."""


def model(q, k, v, layer, start, end, gate, first=0):
    """Returns what `attn_prefill` does, computed by a model of its warps."""
    (rows, heads, _), (_, capacity, kv_heads, _) = q.shape, k.shape
    plan = Plan(
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        capacity=capacity,
        first=first,
        panels=Q8Panels if isinstance(k, Q8Rows) else BfloatPanels,
    )
    out = np.full(q.shape, np.nan, np.float32)
    numbers = np.asarray([int(x) for x in (layer, start, end)], np.int32)
    cache = [np.asarray(x) for x in jax.tree.leaves((k, v))]
    places = np.cumsum([0, *plan.shared_bytes])
    refs = np.asarray(q), *cache, numbers, np.asarray(gate), out, *map(int, places[:3])
    for block in range(plan.row_tiles * plan.pairs):
        shared, barriers = np.full(places[-1] // 4, 0x7FC07FC0, np.uint32), Barriers()

        def run(thread, threads, work, prepares=False, shared=shared, barriers=barriers, b=block):
            isa = Role(thread, threads, shared, barriers, b)
            at = Places(isa, plan, refs)
            if prepares:
                prepare_barriers(isa, at)
            guard_stages(isa, at, STAGES, TILE_BYTES)
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                work(at)

        run(0, 32, lambda at: None, prepares=True)
        roles = [functools.partial(run, 128 * i, 128, consume) for i in range(HEADS)]
        for which in range(2):
            work = functools.partial(produce, which=which)
            roles.append(functools.partial(run, 128 * HEADS + 64 * which, 64, work))
        run_roles(barriers, roles)
    return jnp.asarray(out)


def wanted(q, k, v, layer, start, end, gate, first=0) -> np.ndarray:
    """Returns the same in float64."""
    rows, heads, width = q.shape
    keys, held = (np.asarray(values(x[layer, : int(end)]), np.float64) for x in (k, v))
    group = heads // keys.shape[1]
    keys, held = (np.repeat(x, group, 1) for x in (keys, held))
    at, own = np.arange(int(end)), int(start) + np.arange(rows)
    seen = (at[None] <= own[:, None]) & (at[None] >= first)
    held = np.where((at >= first)[:, None, None], held, 0)
    scores = np.einsum("rhd,thd->hrt", np.asarray(q, np.float64), keys) / np.sqrt(width)
    scores = np.where(seen, scores, -np.inf)
    live = (own >= first) & (own < int(end))
    scores[:, ~live] = 0
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hrt,thd->rhd", weights / weights.sum(-1, keepdims=True), held)
    out = out / (1 + np.exp(-np.asarray(gate, np.float64)))
    return np.where(live[:, None, None], out, 0)


reference_on_card = jax.jit(attention_reference, static_argnames="first")


def on_card(q, k, v, layer, start, end, gate, first=0) -> np.ndarray:
    """Returns the same in float32, for sizes that take the host too long."""
    own = start + jnp.arange(q.shape[0])
    own = jnp.where((own >= first) & (own < end), own, -1)
    out = reference_on_card(q, k[layer], v[layer], own, end, first=first)
    return np.asarray(out * jax.nn.sigmoid(gate), np.float64)


def relative_error(got, want) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def assert_agrees(run, reference, kind, operands, live, first=0) -> None:
    """Compares with the reference; keys that no row may see are NaN, as are idle rows' queries."""
    q, k, v, gate, start, _ = operands
    end = start + live
    k, v = (spoiled(x, first, int(end)) for x in (k, v))
    q = q.at[live:].set(jnp.nan)
    at = jnp.int32(1), start, end, gate
    got = np.asarray(run(q, k, v, *at, first=first), np.float64)
    idle = max(0, first - int(start))
    assert not got[live:].any() and not got[:idle].any()
    want = reference(jnp.nan_to_num(q), k, v, *at, first=first)
    error = relative_error(got[idle:live], want[idle:live])
    print(f"{kind}: {error:.2e}")
    assert error < LIMITS[kind]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "history", "rows", "live", "first"),
    [
        (6, 1, 0, 70, 70, 0),
        (2, 1, 79, 3, 1, 0),
        (4, 2, 401, 64, 50, 0),
        (2, 1, 0, 130, 129, 1),
        (2, 1, 161, 66, 60, 90),
        (2, 1, -1, 66, 66, 0),
    ],
)
def test_attention_agrees_with_its_reference(kind, heads, kv_heads, history, rows, live, first):
    operands = chunk_operands(history, rows, 2, kind, heads, kv_heads)
    assert_agrees(model, wanted, kind, operands, live, first)


def assert_bits_stand(run, kind, operands) -> None:
    """A row has the same bits whatever stands beside it, and however the prompt is cut."""
    q, k, v, gate, start, end = operands
    layer = jnp.int32(0)
    out = np.asarray(run(q, k, v, layer, start, end, gate))
    again = np.asarray(run(q, k, v, layer, start, end, gate))
    np.testing.assert_array_equal(out, again)
    cut = q.shape[0] // 3 + 1
    other = q.at[:cut].multiply(-3)
    out_of_other = np.asarray(run(other, k, v, layer, start, end, gate))
    np.testing.assert_array_equal(out_of_other[cut:], out[cut:])
    rest = np.asarray(run(q[cut:], k, v, layer, start + cut, end, gate[cut:]))
    np.testing.assert_array_equal(rest, out[cut:])
    front = np.asarray(run(q, k, v, layer, start, start + cut, gate))
    np.testing.assert_array_equal(front[:cut], out[:cut])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_alone(kind):
    assert_bits_stand(model, kind, chunk_operands(130, 40, 2, kind, 2, 1))


def test_rows_that_all_stand_beyond_the_end_are_zeros():
    q, k, v, gate, start, _ = chunk_operands(100, 9, 2, "bfloat16", 2, 1)
    assert not np.asarray(model(q, k, v, jnp.int32(1), start, start, gate)).any()


def test_sizes_without_a_kernel_are_refused():
    def cache(kind, kv_heads=4):
        return jax.eval_shape(lambda: chunk_operands(64, 64, 1, kind, 24, kv_heads)[1])

    def queries(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    q = queries(64, 24, WIDTH)
    assert [fits(q, cache(kind)) for kind in (*FORMATS, "float32")] == [True, True, False]
    assert not fits(q, cache("bfloat16", 8)) and not fits(q, cache("bfloat16", 24))
    for shape in ((64, 24, 128), (16, 24, WIDTH)):
        assert not fits(queries(*shape), cache("bfloat16"))
    with pytest.raises(ValueError, match="an even number of heads each"):
        Plan(rows=64, heads=12, kv_heads=4, capacity=256)
    q, k, v, gate, start, end = chunk_operands(0, 8, 1, "bfloat16", 2, 1)
    with pytest.raises(ValueError, match="heads of width 256"):
        attn_prefill(q[..., :64], k, v, end, start, end, gate)


def test_shared_memory_holds_what_a_block_needs():
    plan = Plan(rows=ROWS, heads=24, kv_heads=4, capacity=256)
    assert sum(-(-size // 1024) * 1024 for size in plan.shared_bytes) <= 232448 - 1024
    assert TILE % 16 == 0


@pytest.mark.parametrize(("rows", "start", "live"), [(20, 90, 17), (8, 90, 5)])
def test_a_layer_hands_a_chunk_to_the_kernel(rows, start, live, monkeypatch):
    q, k, v, gate, *_ = chunk_operands(start, rows, 2, "bfloat16", 2, 1)
    at = attention_layers.window(jnp.int32(start), jnp.arange(rows) < live)
    calls = []

    def kernel(*operands):
        calls.append(operands)
        return model(*operands)

    def gated(attended, gate, weights, layer):
        return (attended * jax.nn.sigmoid(gate)).reshape(rows, -1)

    monkeypatch.setattr(attention_prefill, "attn_prefill", kernel)
    parts = q, gate, k[1, start : start + rows], v[1, start : start + rows]
    monkeypatch.setattr(attention_layers, "attention_inputs", lambda *_: parts)
    monkeypatch.setattr(attention_layers, "attention_output", gated)
    monkeypatch.setattr(attention_layers, "_has_kernels", lambda *_: False)
    monkeypatch.setattr(attention_layers, "project", lambda x, *_: x)
    # The chunk's own keys are not in the cache yet.
    cache = state.KVCache(k=spoiled(k, 0, start), v=spoiled(v, 0, start))
    outs = []
    for kernels in (False, True):
        weights: Any = types.SimpleNamespace(kernels=kernels, out=None)
        no_input: Any = None
        out, _ = attention_layers.attention(no_input, 1, cache, weights, at, no_input)
        outs.append(np.asarray(out, np.float64))
    assert len(calls) == (rows >= FEWEST)
    assert not outs[1][live:].any()
    assert relative_error(outs[1], outs[0]) < LIMITS["bfloat16"]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("heads", [(8, 2), (16, 4), (24, 4)])
def test_attention_compiles_to_machine_code_at_full_rate(heads, kind, h200):
    from bench.compile_kernels import compile_attn_prefill

    report = compile_attn_prefill(heads[0], heads[1], kind, h200)
    assert report.spilled_bytes == 0 and not report.serialised


def test_attention_lowers_for_a_gpu_on_a_host_without_one():
    q, k, v, gate, start, end = jax.eval_shape(lambda: chunk_operands(300, 200, 2, "bfloat16"))
    run: Any = jax.jit(attn_prefill)
    lowered = run.trace(q, k, v, end, start, end, gate).lower(lowering_platforms=("cuda",))
    assert "attn_prefill_kernel" in lowered.as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("history", [0, 31, 32, 33, 1023, 9000])
@pytest.mark.parametrize("rows", [1, 63, 64, 200, 2048])
def test_attention_is_right_on_the_card(kind, rows, history):
    # One capacity of the cache, so that a program serves all histories.
    operands = *chunk_operands(9000, rows, 2, kind)[:4], jnp.int32(history), None
    assert_agrees(attn_prefill, on_card, kind, operands, rows)
    if rows > 2:
        assert_agrees(attn_prefill, on_card, kind, operands, rows - 2, first=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 4), (8, 2)])
def test_other_models_heads_are_right_on_the_card(kind, heads, kv_heads):
    operands = chunk_operands(131072 - 100, 300, 2, kind, heads, kv_heads)
    assert_agrees(attn_prefill, on_card, kind, operands, 300)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "history"), [(200, 33), (2048, 0), (2048, 9000)])
def test_a_row_has_the_same_bits_alone_on_the_card(kind, rows, history):
    assert_bits_stand(attn_prefill, kind, chunk_operands(history, rows, 2, kind))
