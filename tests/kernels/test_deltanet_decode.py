"""The one-kernel Gated DeltaNet layer: its arithmetic in a model of the grid, and on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.deltanet_layer import (
    Inputs,
    Memory,
    Parameters,
    Sizes,
    gdn_decode_reference,
)
from tests.kernels.cluster_model import Buffer, Grid

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from bench.deltanet import GDN_SIZES, gdn_operands, gdn_sizes  # noqa: E402
from pallas_kernels.deltanet_decode import (  # noqa: E402
    ROWS,
    Columns,
    Operands,
    Shared,
    Tiles,
    fits,
    gdn_decode,
    layer_kernel,
)

LAYERS = 2
kernel: Any = gdn_decode
NOWHERE = (jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(0))


def operands_of(sizes: Sizes, seed: int = 0) -> tuple[Inputs, Parameters, Memory]:
    return gdn_operands(sizes, LAYERS, jax.random.key(seed))


def model(*operands, tiles=None, first=(0, 0, 0, 0)):
    """Returns what `gdn_decode` does, computed by the model of a grid."""
    x, parameters, memory, layer, start, num_pending, num_live, sizes = operands
    tiles = tiles or Tiles()
    groups = sizes.value_heads // sizes.key_heads
    blocks = sizes.key_heads * tiles.splits
    grid = Grid(blocks, tiles.splits, 128 * groups, Shared(groups, tiles).bytes)
    counts = [np.full(1, int(n), np.int32) for n in (layer, start, num_pending, num_live)]
    leaves, tree = jax.tree.flatten(memory)
    empty = np.full((ROWS, sizes.value_heads * sizes.width), np.nan)
    arrays = [*jax.tree.leaves((x, parameters)), *counts, *leaves, empty]
    buffers = [Buffer(np.array(array, np.asarray(array).dtype.name)) for array in arrays[:-1]]
    buffers.append(Buffer(arrays[-1].astype(np.float32)))
    with np.errstate(invalid="ignore"):
        layer_kernel(grid, sizes, tiles, Columns.of(x, first), Operands(*buffers, None))
    *_, out = buffers
    remembered = [jnp.asarray(buffer.values) for buffer in buffers[12:-1]]
    return jnp.asarray(out.values), jax.tree.unflatten(tree, remembered)


def close(got, want, tolerance: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.sqrt(np.mean((got - want) ** 2)) <= tolerance * np.sqrt(np.mean(want**2))


def assert_agree(run, sizes: Sizes, layer=1, start=2, num_pending=3, num_live=5) -> None:
    """Compares outputs and memory with the reference: float32 sums in another order."""
    at = [jnp.int32(n) for n in (layer, start, num_pending, num_live)]
    operands = *operands_of(sizes), *at
    out, memory = run(*operands, sizes)
    wanted, wanted_memory = jax.jit(gdn_decode_reference, static_argnums=7)(*operands, sizes)
    close(out, wanted, 2e-5)
    assert np.all(np.asarray(out)[num_live:] == 0)
    np.testing.assert_array_equal(memory.window, wanted_memory.window)
    for got, want in zip(jax.tree.leaves(memory), jax.tree.leaves(wanted_memory), strict=True):
        close(got, want, 5e-6)


@pytest.mark.parametrize("counts", [(0, 0, 1), (3, 3, 5), (8, 8, 8), (2, 1, 0), (5, 0, 8)])
def test_a_layer_agrees_with_its_reference(counts):
    start, num_pending, num_live = counts
    assert_agree(model, gdn_sizes(2, 2), 1, start, num_pending, num_live)


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [(gdn_sizes(1, 1), 4), (gdn_sizes(1, 3), 8), (gdn_sizes(3, 2, gate="sigmoid", eps=1e-3), 4)],
    ids=str,
)
def test_a_layer_agrees_whatever_its_heads_and_cuts(sizes, splits):
    assert_agree(functools.partial(model, tiles=Tiles(splits=splits)), sizes)


def test_projections_are_read_where_they_stand_in_a_wider_matrix():
    sizes, counts = gdn_sizes(2, 2), (1, 2, 3, 5)
    x, parameters, memory = operands_of(sizes)
    pad = jnp.full((ROWS, 16), jnp.nan)
    joined = jnp.concatenate([pad, x.z, x.a, x.b], axis=1)
    u = jnp.concatenate([x.u, pad], axis=1)
    ends = np.cumsum([16, x.z.shape[1], x.a.shape[1]]).tolist()
    apart = model(x, parameters, memory, *counts, sizes)
    together = Inputs(u=u, z=joined, a=joined, b=joined)
    got = model(together, parameters, memory, *counts, sizes, first=(0, *ends))
    jax.tree.map(np.testing.assert_array_equal, got, apart)


def cycles(run, sizes: Sizes, accepted: list[int], live: int):
    """Returns outputs of 6 positions and the folded state after them, in cycles that accept some.

    Args:
      run: the layer.
      sizes: of the layer.
      accepted: rows each cycle keeps; all in all 6.
      live: rows that run in each cycle, the rejected ones on other inputs.
    """
    text, parameters, memory = operands_of(sizes)
    noise, *_ = operands_of(sizes, seed=9)
    outs, position, pending = [], 0, 0
    for kept in accepted:

        def rows(right, wrong, position=position, kept=kept):
            return jnp.concatenate([right[position : position + kept], wrong])[:ROWS]

        x = jax.tree.map(rows, text, noise)
        at = [jnp.int32(n) for n in (0, pending, pending, max(live, kept))]
        out, memory = run(x, parameters, memory, *at, sizes)
        outs.append(out[:kept])
        position, pending = position + kept, kept
    at = [jnp.int32(n) for n in (0, pending, pending, 0)]
    _, memory = run(noise, parameters, memory, *at, sizes)
    return np.concatenate(outs), np.asarray(memory.delta[0])


def assert_bits_stand(run, sizes: Sizes) -> None:
    outs, delta = cycles(run, sizes, [1] * 6, 1)
    for accepted, live in (([1] * 6, 8), ([6], 6), ([2, 1, 3], 5), ([5, 1], 8), ([3, 3], 4)):
        other_outs, other_delta = cycles(run, sizes, accepted, live)
        np.testing.assert_array_equal(other_delta, delta)
        np.testing.assert_array_equal(other_outs, outs)


def test_states_and_outputs_have_the_same_bits_whatever_cycles_accept():
    assert_bits_stand(model, gdn_sizes(1, 1))


def test_a_layer_of_sizes_without_a_kernel_is_refused():
    for sizes in (gdn_sizes(2, 2, width=64), gdn_sizes(2, 2, taps=3), gdn_sizes(2, 5)):
        assert not fits(sizes)
        specs = jax.eval_shape(functools.partial(operands_of, sizes))
        with pytest.raises(ValueError, match="use gdn_decode_reference"):
            jax.eval_shape(lambda *a, s=sizes: kernel(*a, *NOWHERE, s), *specs)


def test_rows_that_are_not_padded_are_refused():
    x, *others = operands_of(gdn_sizes(2, 2))
    x = jax.tree.map(lambda leaf: leaf[:5], x)
    with pytest.raises(ValueError, match="must be 8; pad the rows"):
        kernel(x, *others, *NOWHERE, gdn_sizes(2, 2))


def test_splits_that_do_not_fill_lanes_are_refused():
    with pytest.raises(ValueError, match="must be 4 or 8"):
        Tiles(splits=2)


@pytest.mark.parametrize("splits", [8, 4])
@pytest.mark.parametrize("sizes", GDN_SIZES, ids=str)
def test_a_layer_compiles_to_machine_code_without_spills(sizes, splits, h200):
    from bench.compile_kernels import compile_gdn_decode

    report = compile_gdn_decode(sizes, h200, Tiles(splits=splits))
    groups = sizes.value_heads // sizes.key_heads
    # Where two blocks of threads fit a multiprocessor, all clusters of eight find free ones; the 64
    # blocks of clusters of four find one each.
    together = 2 if splits == 8 else 1
    assert report.spilled_bytes == 0 and report.registers * 128 * groups <= 65536 // together
    assert report.copied_bytes == 0


def test_a_layer_lowers_for_a_gpu_on_a_host_without_one():
    sizes = gdn_sizes(16, 3)
    specs = jax.eval_shape(lambda: operands_of(sizes))
    at = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    lowered = jax.jit(lambda *a: kernel(*a, sizes)).trace(*specs, *at)
    assert "gdn_decode_kernel" in lowered.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [8, 4])
@pytest.mark.parametrize("heads", [(16, 1), (16, 2), (16, 3), (2, 4)])
def test_a_layer_is_right_on_the_card(heads, splits):
    run = jax.jit(functools.partial(kernel, tiles=Tiles(splits=splits)), static_argnums=7)
    for counts in ((0, 0, 1), (3, 3, 5), (8, 8, 8), (2, 1, 0), (5, 0, 8)):
        assert_agree(run, gdn_sizes(*heads), 1, *counts)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [8, 4])
def test_states_and_outputs_have_the_same_bits_on_the_card_whatever_cycles_accept(splits):
    run = jax.jit(functools.partial(kernel, tiles=Tiles(splits=splits)), static_argnums=7)
    for groups in (1, 3):
        assert_bits_stand(run, gdn_sizes(16, groups))
