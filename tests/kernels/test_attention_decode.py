"""Attention of a cycle against a long cache: in a model of its warps, and on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention_reference
from pallas_kernels.cached_rows import Q8_0, Q8Rows, empty, like, values
from tests.kernels.cluster_model import Buffer, Grid
from tests.kernels.role_model import Barriers, Role, guard_stages, run_roles

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from pallas_kernels import attention_chunks, attention_decode  # noqa: E402
from pallas_kernels.attention_chunks import (  # noqa: E402
    MERGERS,
    ROWS,
    SIZES,
    merge_kernel,
    merge_shared_bytes,
)
from pallas_kernels.attention_decode import (  # noqa: E402
    POSITIONS,
    PRODUCERS,
    STAGE_BYTES,
    STAGES,
    Block,
    Plan,
    attn_decode,
    consume,
    fits,
    prepare_barriers,
    produce,
)
from pallas_kernels.attention_panels import WIDTH, BfloatPanels, Q8Panels  # noqa: E402

FORMATS = ["bfloat16", Q8_0]
LIMITS = {"bfloat16": 2e-3, Q8_0: 2.5e-3}
"""Largest relative RMS error against float64 over the same keys and values: softmax weights are
rounded to bfloat16, 2^-9, and values in q8_0 are too, once more than in the cache."""

LENGTHS = [1, 31, 32, 33, 1023, 2049, 32768, 131072]

NAN = 0x7FC07FC0

reference = jax.jit(attention_reference, static_argnames="first")


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


def run_block(plan: Plan, index: int, refs) -> None:
    """Runs a block of threads of the chunks' kernel: the consumer and both producers."""
    places = np.cumsum([0, *plan.shared_bytes])
    shared, barriers = np.full(places[-1] // 4, NAN, np.uint32), Barriers()

    def thread(first, threads, work, prepares=False):
        isa: Any = Role(first, threads, shared, barriers, index)
        at = Block(isa, plan, (*refs, *map(int, places[:3])))
        if prepares:
            prepare_barriers(isa, at)
        guard_stages(isa, at, STAGES, STAGE_BYTES)
        if at.rounds[0] > 0:
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                work(at)

    thread(0, 32, lambda at: None, prepares=True)
    roles = [functools.partial(thread, 0, 128, consume)]
    for which in range(2):
        work = functools.partial(produce, which=which)
        roles.append(functools.partial(thread, 128 * (1 + which), 32 * PRODUCERS, work))
    run_roles(barriers, roles)


def model(q, k, v, layer, positions, end, gate, first=0, gate_columns=None):
    """Returns what `attn_decode` does, computed by a model of the warps of its blocks."""
    (_, heads, _), (_, capacity, kv_heads, _) = q.shape, k.shape
    plan = Plan(
        heads=heads,
        kv_heads=kv_heads,
        capacity=capacity,
        first=first,
        panels=Q8Panels if isinstance(k, Q8Rows) else BfloatPanels,
    )
    counts = np.asarray(positions + 1, np.int32)
    shape = plan.chunks, heads, ROWS
    sums, stats = (np.full((*shape, w), np.nan, np.float32) for w in (WIDTH, 2))
    cache = [np.asarray(x) for x in jax.tree.leaves((k, v))]
    scalars = [np.full(1, int(n), np.int32) for n in (layer, end)]
    for block in range(plan.blocks):
        run_block(plan, block, (np.asarray(q), *cache, counts, *scalars, sums, stats))
    merge: Any = merge_kernel
    columns = gate_columns or (heads * WIDTH, 0, WIDTH)
    operands = [Buffer(x) for x in (sums, stats, np.asarray(gate), counts)]
    out = Buffer(np.full(q.shape, np.nan, np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        grid = Grid(heads * ROWS, 1, 128 * MERGERS, merge_shared_bytes())
        merge(grid, plan, columns, *operands, out, 0)
    return jnp.asarray(out.values)


def wanted(q, k, v, layer, positions, end, gate, first=0) -> np.ndarray:
    """Returns the same in float64."""
    rows, heads, width = q.shape
    keys, held = (np.asarray(values(x[layer, first : int(end)]), np.float64) for x in (k, v))
    group = heads // keys.shape[1]
    keys, held = (np.repeat(x, group, 1) for x in (keys, held))
    at, own = first + np.arange(len(keys)), np.asarray(positions)
    scores = np.einsum("rhd,thd->hrt", np.asarray(q, np.float64), keys) / np.sqrt(width)
    scores = np.where((at[None] <= own[:, None]) | (own < first)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hrt,thd->rhd", weights / weights.sum(-1, keepdims=True), held)
    out = out / (1 + np.exp(-np.asarray(gate, np.float64)))
    return np.where((own >= first)[:, None, None], out, 0)


def wanted_on_card(q, k, v, layer, positions, end, gate, first=0) -> np.ndarray:
    """Returns the same in float32, for sizes that take the host too long."""
    out = reference(q, k[layer], v[layer], positions, end, first=first)
    return np.asarray(out * jax.nn.sigmoid(gate), np.float64)


def assert_agrees(run, want, kind, heads, kv_heads, capacity, length, live, first=0) -> None:
    """Compares with the reference; what no row may see is NaN, as are idle rows' queries."""
    q, k, v, gate = operands_of(heads, kv_heads, capacity, kind)
    k, v = (spoiled(x, first, length) for x in (k, v))
    at = jnp.int32(1), positions_of(length, live), jnp.int32(length), gate
    got = np.asarray(run(q.at[live:].set(jnp.nan), k, v, *at, first=first), np.float64)
    assert not got[live:].any()
    true = want(q, k, v, *at, first=first)
    error = np.sqrt(np.mean((got - true)[:live] ** 2) / np.mean(true[:live] ** 2))
    print(f"{kind}: {error:.2e}")
    assert error < LIMITS[kind]


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


@pytest.fixture
def long_chunks(monkeypatch):
    """Lets few positions be more tiles than stages: chunks of 64 positions, then of 384."""
    sizes = ((0, 64), (128, 384))
    assert sizes[1][1] > STAGES * POSITIONS
    monkeypatch.setattr(attention_chunks, "SIZES", sizes)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "live", "first"),
    [
        (6, 1, 31, 5, 0),
        (8, 2, 200, 8, 1),
        (8, 1, 65, 8, 0),
        (2, 1, 1, 1, 0),
        (2, 1, 250, 8, 70),
        (2, 1, 250, 3, 140),
    ],
)
def test_attention_agrees_with_its_reference(kind, heads, kv_heads, length, live, first):
    assert_agrees(model, wanted, kind, heads, kv_heads, 256, length, live, first)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "first"), [(6, 1, 517, 0), (4, 1, 450, 1), (2, 1, 513, 70)]
)
def test_rings_of_tiles_turn(kind, heads, kv_heads, length, first, long_chunks):
    assert_agrees(model, wanted, kind, heads, kv_heads, 768, length, 6, first)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
def test_a_block_goes_from_chunk_to_chunk(kind, multiprocessors, long_chunks, monkeypatch):
    monkeypatch.setattr(attention_decode, "MULTIPROCESSORS", multiprocessors)
    q, k, v, gate = operands_of(6, 1, 1024, kind)
    at = jnp.int32(1), positions_of(970, 6), jnp.int32(970), gate
    got = np.asarray(model(q, k, v, *at))
    monkeypatch.setattr(attention_decode, "MULTIPROCESSORS", 132)
    np.testing.assert_array_equal(got, model(q, k, v, *at))
    error = np.sqrt(np.mean((got - wanted(q, k, v, *at))[:6] ** 2) / np.mean(got[:6] ** 2))
    assert error < LIMITS[kind]


def test_chunks_tile_the_positions_of_every_capacity():
    for capacity in (64, 256, 2048, 2304, 8192, 9216, 33024):
        chunks, position = 0, 0
        while position < capacity:
            position += [size for start, size in SIZES if start <= position][-1]
            chunks += 1
        assert Plan(heads=24, kv_heads=4, capacity=capacity).chunks == chunks


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 36, 52, 84])
def test_chunks_are_dealt_once_each_and_evenly(num_chunks, monkeypatch):
    monkeypatch.setattr(attention_decode, "num_chunks", lambda *_: isa.Word(num_chunks))
    plan = Plan(heads=24, kv_heads=4, capacity=131072)
    found: list[tuple[int, int]] = []
    most = []
    for block in range(plan.blocks):
        isa: Any = Role(0, 32, np.zeros(1, np.uint32), Barriers(), block)
        scalars = [np.asarray([x], np.int32) for x in (0, 131072)]
        refs = np.zeros(1), *[np.zeros(1)] * 2, np.zeros(ROWS, np.int32), *scalars
        at = Block(isa, plan, (*refs, np.zeros(1), np.zeros(1), 0, 0, 0))
        mine = [int(at.chunk(isa.Word(turn))[0][0]) for turn in range(int(at.rounds[0]))]
        found += [(block % 4, index) for index in mine]
        most.append(len(mine))
    assert sorted(found) == [(head, index) for head in range(4) for index in range(num_chunks)]
    assert max(most) - min(most) <= 1


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", [130, 386])
def test_a_row_has_the_same_bits_alone(kind, length, long_chunks):
    assert_bits_stand(model, kind, 4, 1, 512, length)


def test_rows_that_stand_far_apart_see_their_own_positions(long_chunks):
    q, k, v, gate = operands_of(6, 1, 512)
    positions = jnp.asarray([3, 500, -1, 64, 127, 128, 200, 341])
    at = jnp.int32(0), positions, jnp.int32(501), gate
    got, true = np.asarray(model(q, k, v, *at), np.float64), wanted(q, k, v, *at)
    assert not got[2].any()
    live = np.asarray(positions) >= 0
    error = np.mean((got - true)[live] ** 2, (1, 2)) / np.mean(true[live] ** 2, (1, 2))
    assert np.all(np.sqrt(error) < LIMITS["bfloat16"])


def test_gates_may_lie_in_a_wider_matrix():
    q, k, v, gate = operands_of(4, 1, 128)
    at = jnp.int32(0), positions_of(100, 3), jnp.int32(100)
    wide = jnp.concatenate([jnp.full_like(gate, jnp.nan), gate], -1)
    columns = 2 * 4 * WIDTH, WIDTH, 2 * WIDTH
    got = model(q, k, v, *at, wide.reshape(ROWS, -1), gate_columns=columns)
    np.testing.assert_array_equal(got, model(q, k, v, *at, gate))


def test_tiles_divide_all_chunks_and_memory_holds_them():
    assert all(size % POSITIONS == 0 for _, size in SIZES) and POSITIONS % 16 == 0
    plan = Plan(heads=24, kv_heads=4, capacity=256)
    assert sum(-(-size // 1024) * 1024 for size in plan.shared_bytes) <= 232448 - 1024


def test_sizes_without_a_kernel_are_refused():
    caches = [empty((1, 64, 4, WIDTH), kind) for kind in (*FORMATS, "float32")]
    found = [fits(jnp.zeros((8, 24, WIDTH)), cache) for cache in caches]
    assert found == [True, True, False]
    for shape in ((64, 24, 256), (8, 12, 256), (8, 9, 256), (8, 24, 64)):
        assert not fits(jnp.zeros(shape), caches[0])
    with pytest.raises(ValueError, match="use attention_reference"):
        Plan(heads=12, kv_heads=4, capacity=256)
    with pytest.raises(ValueError, match="must be a multiple of POSITIONS=64"):
        Plan(heads=8, kv_heads=2, capacity=96)
    q, k, v, gate = operands_of(8, 2, 256)
    with pytest.raises(ValueError, match="must be 8 rows of width 256"):
        attn_decode(q[:4], k, v, jnp.int32(0), jnp.arange(4), jnp.int32(4), gate[:4])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("heads", [(8, 2), (16, 4), (24, 4)])
def test_attention_compiles_to_machine_code_at_full_rate(heads, kind, h200):
    from bench.compile_kernels import compile_attn_decode

    reports = compile_attn_decode(heads[0], heads[1], kind, h200)
    assert len(reports) == 2
    assert all(report.spilled_bytes == 0 and not report.serialised for report in reports)


def test_attention_lowers_for_a_gpu_on_a_host_without_one():
    q, k, v, gate = jax.eval_shape(lambda: operands_of(24, 4, 256))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    row = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    traced = jax.jit(attn_decode).trace(q, k, v, number, row, number, gate)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "attn_decode_kernel" in text and "attn_decode_merge_kernel" in text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (16, 4), (8, 2)])
def test_attention_is_right_on_the_card(kind, heads, kv_heads, length):
    capacity = -(-(length + ROWS) // 256) * 256
    sizes = kind, heads, kv_heads, capacity, length
    assert_agrees(attn_decode, wanted_on_card, *sizes, min(5, length))
    if length > 1:
        assert_agrees(attn_decode, wanted_on_card, *sizes, 1, first=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", [33, 1025, 9000])
def test_a_row_has_the_same_bits_alone_on_the_card(kind, length):
    capacity = -(-(length + ROWS) // 256) * 256
    assert_bits_stand(attn_decode, kind, 24, 4, capacity, length)
