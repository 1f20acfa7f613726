"""Attention of a cycle against a long cache: in a model of the grid, and on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention_reference
from pallas_kernels.cached_rows import Q8_0, Q8Rows, empty, like
from tests.kernels.cluster_model import Buffer, Grid

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from pallas_kernels.attention_decode import (  # noqa: E402
    MERGERS,
    SIZES,
    Cut,
    attn_decode,
    chunk_kernel,
    fits,
    merge_kernel,
    merge_shared_bytes,
    shared_bytes,
)
from pallas_kernels.attention_tiles import (  # noqa: E402
    ROWS,
    WARPS,
    WIDTH,
    BfloatTiles,
    Q8Tiles,
)

LIMIT = 2e-3
"""Largest relative RMS error: weights are rounded to bfloat16, 2^-9."""

reference = jax.jit(attention_reference, static_argnames="first")


FORMATS = ["bfloat16", Q8_0]


def operands_of(heads: int, kv_heads: int, capacity: int, kind: str = "bfloat16"):
    """Returns queries, keys and values of two layers, and gates."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = 2, capacity, kv_heads, WIDTH
    cache = empty((1, WIDTH), kind)
    return (
        jax.random.normal(keys[0], (ROWS, heads, WIDTH)),
        like(cache, jax.random.normal(keys[1], shape)),
        like(cache, jax.random.normal(keys[2], shape)),
        jax.random.normal(keys[3], (ROWS, heads, WIDTH)),
    )


def spoiled(cache, first: int, length: int):
    """Returns a cache whose other positions hold NaN, or codes that mean nothing."""

    def leaf(x):
        at = jnp.arange(x.shape[1])[None, :, None, None]
        bad = 77 if x.dtype == jnp.int8 else jnp.nan
        return jnp.where((at < first) | (at >= length), jnp.asarray(bad, x.dtype), x)

    return jax.tree.map(leaf, cache)


def positions_of(length: int, live: int) -> jax.Array:
    """Returns positions of the last live rows of a text of so many positions."""
    row = jnp.arange(ROWS)
    return jnp.where(row < live, length - live + row, -1)


def model(q, k, v, layer, positions, end, gate, first=0, gate_columns=None):
    """Returns what `attn_decode` does, computed by the model of a grid."""
    _, heads, _ = q.shape
    _, capacity, kv_heads, _ = k.shape
    tiles = Q8Tiles if isinstance(k, Q8Rows) else BfloatTiles
    cut = Cut(heads=heads, kv_heads=kv_heads, capacity=capacity, first=first, tiles=tiles)
    counts = Buffer(np.asarray(positions + 1))
    scalars = [Buffer(np.full(1, int(n), np.int32)) for n in (layer, end)]
    shape = cut.chunks, heads, ROWS
    sums, stats = (Buffer(np.full((*shape, w), np.nan, np.float32)) for w in (WIDTH, 2))
    cache = [
        Buffer(np.asarray(x).view(np.int8 if x.dtype == jnp.int8 else np.uint16))
        for x in jax.tree.leaves((k, v))
    ]
    grid = Grid(cut.chunks * kv_heads, 1, 32 * WARPS, shared_bytes(cut))
    with np.errstate(invalid="ignore", over="ignore"):
        attend: Any = chunk_kernel
        attend(grid, cut, Buffer(np.asarray(q)), *cache, counts, *scalars, sums, stats, None)
        grid = Grid(heads * ROWS, 1, 128 * MERGERS, merge_shared_bytes())
        out = Buffer(np.full(q.shape, np.nan, np.float32))
        parts = [Buffer(part.values) for part in (sums, stats)]
        merge: Any = merge_kernel
        columns = gate_columns or (heads * WIDTH, 0, WIDTH)
        merge(grid, cut, columns, *parts, Buffer(np.asarray(gate)), counts, out, None)
    return jnp.asarray(out.values)


def assert_agrees(run, kind, heads, kv_heads, capacity, length, live, first=0) -> None:
    """Compares with the reference; what no row may see is NaN."""
    q, k, v, gate = operands_of(heads, kv_heads, capacity, kind)
    k, v = (spoiled(x, first, length) for x in (k, v))
    positions, end = positions_of(length, live), jnp.int32(length)
    out = np.asarray(run(q, k, v, jnp.int32(1), positions, end, gate, first=first), np.float64)
    want = reference(q, k[1], v[1], positions, end, first=first) * jax.nn.sigmoid(gate)
    want = np.asarray(want, np.float64)
    assert np.all(out[live:] == 0)
    assert np.sqrt(np.mean((out - want) ** 2)) < LIMIT * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "live", "first"),
    [(6, 1, 31, 5, 0), (8, 2, 200, 8, 1), (2, 1, 1, 1, 0)],
)
def test_attention_agrees_with_its_reference(kind, heads, kv_heads, length, live, first):
    assert_agrees(model, kind, heads, kv_heads, 256, length, live, first)


def assert_bits_stand(run, kind, heads, kv_heads, capacity, length) -> None:
    """A row has the same bits whatever rows stand beside it and whatever comes after it."""
    q, k, v, gate = operands_of(heads, kv_heads, capacity, kind)
    layer, positions = jnp.int32(0), positions_of(length, 4)
    out = np.asarray(run(q, k, v, layer, positions, jnp.int32(length), gate))
    for row in range(4):
        # The row alone, as the first and only one of a cycle.
        alone = jnp.where(jnp.arange(ROWS) == 0, positions[row], -1)
        first = functools.partial(jnp.roll, shift=-row, axis=0)
        end = positions[row] + 1
        other = np.asarray(run(first(q), k, v, layer, alone, end, first(gate)))
        np.testing.assert_array_equal(other[0], out[row])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_alone(kind):
    assert_bits_stand(model, kind, 4, 1, 256, 130)


def test_chunks_tile_the_positions_of_every_capacity():
    for capacity in (64, 256, 2048, 2304, 8192, 9216, 33024):
        chunks, position = 0, 0
        while position < capacity:
            position += [size for start, size in SIZES if start <= position][-1]
            chunks += 1
        assert Cut(heads=24, kv_heads=4, capacity=capacity).chunks == chunks


def test_sizes_without_a_kernel_are_refused():
    caches = [empty((1, 64, 4, WIDTH), kind) for kind in (*FORMATS, "float32")]
    found = [fits(jnp.zeros((8, 24, WIDTH)), cache) for cache in caches]
    assert found == [True, True, False]
    for shape in ((64, 24, 256), (8, 12, 256), (8, 24, 64)):
        assert not fits(jnp.zeros(shape), caches[0])
    with pytest.raises(ValueError, match="use attention_reference"):
        Cut(heads=12, kv_heads=4, capacity=256)
    with pytest.raises(ValueError, match="must be a multiple of TILE=32"):
        Cut(heads=8, kv_heads=2, capacity=100)
    q, k, v, gate = operands_of(8, 2, 256)
    with pytest.raises(ValueError, match="must be 8 rows of width 256"):
        attn_decode(q[:4], k, v, jnp.int32(0), jnp.arange(4), jnp.int32(4), gate[:4])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("heads", [(8, 2), (16, 4), (24, 4)])
def test_attention_compiles_to_machine_code_without_spills(heads, kind, h200):
    from bench.compile_kernels import compile_attn_decode

    reports = compile_attn_decode(heads[0], heads[1], kind, h200)
    assert len(reports) == 2
    assert all(report.spilled_bytes == 0 for report in reports)


def test_attention_lowers_for_a_gpu_on_a_host_without_one():
    q, k, v, gate = jax.eval_shape(lambda: operands_of(24, 4, 256))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    row = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    traced = jax.jit(attn_decode).trace(q, k, v, number, row, number, gate)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "attn_decode_kernel" in text and "attn_decode_merge_kernel" in text


LENGTHS = [1, 31, 32, 33, 1023, 2049, 32768, 131072]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (16, 4), (8, 2)])
def test_attention_is_right_on_the_card(kind, heads, kv_heads, length):
    run = jax.jit(attn_decode, static_argnames="first")
    capacity = -(-(length + ROWS) // 256) * 256
    assert_agrees(run, kind, heads, kv_heads, capacity, length, min(5, length))
    if length > 1:
        assert_agrees(run, kind, heads, kv_heads, capacity, length, 1, first=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", [33, 1025, 9000])
def test_a_row_has_the_same_bits_alone_on_the_card(kind, length):
    capacity = -(-(length + ROWS) // 256) * 256
    assert_bits_stand(jax.jit(attn_decode), kind, 24, 4, capacity, length)
