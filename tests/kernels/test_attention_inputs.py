"""Norms, rotation and the cache's new rows in one launch: in a model of the grid, and on a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.synthetic_gguf import published
from openjet_jax.layers import rms_norm, rotate, rotation
from openjet_jax.state import KVCache
from pallas_kernels.cached_rows import Q8_0, Q8Rows, empty, values
from tests.kernels.cluster_model import Buffer, Grid

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from pallas_kernels.attention_chunks import ROWS  # noqa: E402
from pallas_kernels.attention_inputs import Plan, attn_inputs, fits, run_warp  # noqa: E402
from pallas_kernels.attention_panels import WIDTH  # noqa: E402

FORMATS = ["bfloat16", Q8_0]
EPS = 1e-6


def config_of(heads: int, kv_heads: int, rotary: int = 64):
    """Returns a configuration with these heads."""
    config, _ = published("27B")
    return dataclasses.replace(config, heads=heads, kv_heads=kv_heads, rotary=rotary)


def operands_of(heads: int, kv_heads: int, kind: str, capacity: int, joined: bool, rotary: int):
    """Returns the arguments of `attn_inputs`, and its settings."""
    keys = jax.random.split(jax.random.key(1), 8)
    widths = (2 * heads * WIDTH, kv_heads * WIDTH, kv_heads * WIDTH)
    q, k, v = (jax.random.normal(key, (ROWS, w)) for key, w in zip(keys, widths, strict=False))
    k = k.at[:, 3].multiply(300)
    v = v.at[2].set(0)
    if joined:
        matrix = jnp.concatenate([jnp.full((ROWS, 12), jnp.nan), q, k, v], axis=1)
        projected = [matrix] * 3
        first = (12, 12 + widths[0], 12 + widths[0] + widths[1])
    else:
        projected, first = [q, k, v], (0, 0, 0)
    norms = [1 + 0.2 * jax.random.normal(key, (3, WIDTH)) for key in keys[3:5]]
    positions = jnp.where(jnp.arange(ROWS) < 5, 9 + jnp.arange(ROWS), -1)
    tables = rotation(positions, config_of(heads, kv_heads, rotary))
    cache = tuple(empty((3, capacity, kv_heads, WIDTH), kind) for _ in range(2))
    cache = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), cache)
    at = (jnp.int32(2), positions)
    settings: Any = dict(heads=heads, first=first, eps=EPS)
    return (projected, norms, tables, cache, *at), settings, (q, k, v)


def model(projected, norms, tables, cache, layer, positions, *, heads, first, eps):
    """Returns what `attn_inputs` does, computed by the model of a grid."""
    k, _ = cache
    plan = Plan(
        heads=heads,
        kv_heads=k.shape[2],
        columns=tuple((m.shape[1], at) for m, at in zip(projected, first, strict=True)),
        distance=2 * WIDTH,
        pairs=tables[0].shape[1],
        capacity=k.shape[1],
        eps=eps,
        quantized=isinstance(k, Q8Rows),
    )
    planes, tree = jax.tree.flatten(cache)
    stored = [
        Buffer(np.array(x).view(np.int8 if x.dtype == jnp.int8 else np.uint16)) for x in planes
    ]
    counts = [np.asarray(positions + 1), np.full(1, int(layer), np.int32)]
    given = [Buffer(np.array(x)) for x in (*projected, *norms, *tables, *counts)]
    out = Buffer(np.full((ROWS, heads, WIDTH), np.nan, np.float32))
    run: Any = run_warp
    with np.errstate(invalid="ignore", over="ignore"):
        run(Grid(ROWS * plan.blocks, 1, 128, 16), plan, *given, *stored, out)
    kept = [
        jnp.asarray(buffer.values.view(np.asarray(x).dtype))
        for buffer, x in zip(stored, planes, strict=True)
    ]
    return jnp.asarray(out.values), jax.tree.unflatten(tree, kept)


def reference(operands, apart, *, heads, first, eps):
    _, norms, _, (k_cache, v_cache), layer, positions = operands
    q, k, v = apart
    kv_heads, rotary = k_cache.shape[2], 2 * operands[2][0].shape[1]
    config = config_of(heads, kv_heads, rotary)
    q = q.reshape(ROWS, heads, 2 * WIDTH)[..., :WIDTH]
    q = rotate(rms_norm(q, norms[0][layer], eps), positions, config)
    k = rms_norm(k.reshape(ROWS, kv_heads, WIDTH), norms[1][layer], eps)
    k, v = rotate(k, positions, config), v.reshape(ROWS, kv_heads, WIDTH)
    kv = KVCache(k=k_cache, v=v_cache).write(layer, jnp.int32(9), k, v, positions >= 0)
    return q, (kv.k, kv.v)


def assert_agrees(run, heads, kv_heads, kind, joined=True, rotary=64, capacity=24) -> None:
    """Compares queries to 1e-6; cached values to one step of the format, and rarely that."""
    operands, settings, apart = operands_of(heads, kv_heads, kind, capacity, joined, rotary)
    q, cache = run(*operands, **settings)
    wanted, wanted_cache = jax.jit(reference, static_argnames=("heads", "first", "eps"))(
        operands, apart, **settings
    )
    np.testing.assert_allclose(q, wanted, rtol=2e-6, atol=2e-6)
    for got, want in zip(cache, wanted_cache, strict=True):
        a, b = np.asarray(values(got), np.float64), np.asarray(values(want), np.float64)
        assert np.array_equal(np.delete(a[2], np.s_[9:14], 0), np.delete(b[2], np.s_[9:14], 0))
        assert np.array_equal(a[:2], b[:2])
        step = 2.0**-7 * np.abs(b).max(-1, keepdims=True)
        assert np.all(np.abs(a - b) <= step)
        assert np.mean(a != b) < 2e-3
    # Values are not computed with: the same bits.
    same = jax.tree.map(np.array_equal, cache[1], wanted_cache[1])
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "joined", "rotary"),
    [(6, 1, True, 64), (8, 2, False, 64), (2, 1, True, 8), (3, 3, True, 128)],
)
def test_rows_are_normed_rotated_and_stored(kind, heads, kv_heads, joined, rotary):
    assert_agrees(model, heads, kv_heads, kind, joined, rotary)


def test_a_row_does_not_see_the_others():
    operands, settings, _ = operands_of(4, 2, Q8_0, 24, False, 64)
    projected, *rest = operands
    other = [matrix.at[1:].multiply(-3) for matrix in projected]
    (q, cache), (again, changed) = (model(p, *rest, **settings) for p in (projected, other))
    assert np.array_equal(q[0], again[0])
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(changed), strict=True):
        assert np.array_equal(a[2, 9], b[2, 9])


def test_sizes_without_a_kernel_are_refused():
    operands, settings, _ = operands_of(4, 2, "float32", 24, False, 64)
    with pytest.raises(ValueError, match="use the reference"):
        attn_inputs(*operands, **settings)
    cache = empty((1, 8, 2, WIDTH), "bfloat16")
    assert fits(4, cache, 32, ROWS)
    assert not fits(4, cache, 24, ROWS) and not fits(4, cache, 32, 16) and not fits(3, cache, 32, 8)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_kernel_compiles_to_machine_code_without_spills(kind, h200):
    from bench.compile_kernels import compile_attn_inputs

    report = compile_attn_inputs(24, 4, kind, h200)
    assert report.spilled_bytes == 0
    # The cache is written in place.
    assert report.copied_bytes < 1e5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (16, 4), (8, 2)])
def test_rows_are_normed_rotated_and_stored_on_the_card(kind, heads, kv_heads):
    assert_agrees(attn_inputs, heads, kv_heads, kind, capacity=1024)
