"""Gated DeltaNet layers on a card: right first, then the time of all layers.

`python -m bench.deltanet [--out DIR]` measures the 27B model's layers, files two figures, and
compares with the references compiled by XLA: `gdn_decode`, 48 layers of a cycle with 5 live and 3
pending rows, and `gdn_prefill`, one layer of 2,048 rows of a prompt. Times are CUPTI's, with
command buffers off: `XLA_FLAGS=--xla_gpu_enable_command_buffer=`.
"""

import argparse
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import read_bandwidth
from bench.summary import RESULTS, Figure, record
from bench.timing import kernel_times_us, wall_time_us
from pallas_kernels import ptx
from pallas_kernels.delta_rule import Rows
from pallas_kernels.deltanet_decode import ROWS, Tiles, gdn_decode
from pallas_kernels.deltanet_layer import (
    Inputs,
    Memory,
    Parameters,
    Sizes,
    gdn_decode_reference,
    gdn_prefill_reference,
)
from pallas_kernels.deltanet_prefill import gdn_prefill

LAYERS, LIVE, PENDING = 48, 5, 3
MUST_MS, AIM_MS = 0.45, 0.12
LIMIT = 2e-5
"""Largest relative RMS error of outputs against the reference: float32 sums in another order."""

PREFILL_ROWS, PREFILL_LAYERS = 2048, 8
PREFILL_MUST_MS, PREFILL_AIM_MS = 0.9, 0.35
PREFILL_LIMIT = 5e-5
"""As `LIMIT`, and products of pairs of bfloat16, each good to 2^-16 or so."""


def gdn_sizes(key_heads: int, groups: int, **changes) -> Sizes:
    """Returns the sizes of a layer with `groups` value heads a key head, as in published models."""
    plain: dict[str, Any] = dict(width=128, taps=4, eps=1e-6, gate="silu")
    return Sizes(key_heads=key_heads, value_heads=groups * key_heads, **(plain | changes))


GDN_SIZES = [gdn_sizes(16, groups) for groups in (1, 2, 3)]
"""Layers of the 0.8B and 2B, the 4B and 9B, and the 27B model."""


def gdn_operands(
    sizes: Sizes, layers: int, key: jax.Array, rows: int = ROWS
) -> tuple[Inputs, Parameters, Memory]:
    """Returns random inputs, a cycle's by default, parameters and memories.

    Decays go from almost none to all.
    """
    keys = iter(jax.random.split(key, 16))
    heads, width = sizes.value_heads, sizes.width

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    pending_k = normal(layers, ROWS, sizes.key_heads, width)
    x = Inputs(
        u=normal(rows, sizes.channels),
        z=2 * normal(rows, heads * width),
        a=5 * normal(rows, heads),
        b=5 * normal(rows, heads),
    )
    parameters = Parameters(
        conv=normal(layers, sizes.channels, sizes.taps),
        dt_bias=normal(layers, heads) - 2,
        decay=-jnp.exp(2 * normal(layers, heads)),
        norm=1 + normal(layers, width),
    )
    memory = Memory(
        delta=normal(layers, heads, width, width),
        window=normal(layers, sizes.history + ROWS, sizes.channels),
        pending=Rows(
            q=normal(layers, ROWS, sizes.key_heads, width) / width,
            k=pending_k / jnp.linalg.norm(pending_k, axis=-1, keepdims=True),
            v=normal(layers, ROWS, heads, width),
            g=-jnp.exp(normal(layers, ROWS, heads)),
            beta=jax.nn.sigmoid(normal(layers, ROWS, heads)),
        ),
    )
    return x, parameters, memory


def _error(got, want) -> float:
    true = np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((np.asarray(got, np.float64) - true) ** 2) / np.mean(true**2)))


def _all_layers(run, sizes: Sizes):
    @jax.jit
    def layers(x, parameters, memory):
        counts = [jnp.int32(PENDING), jnp.int32(PENDING), jnp.int32(LIVE)]

        def body(layer, carry):
            total, memory = carry
            out, memory = run(x, parameters, memory, layer, *counts, sizes)
            return total + out, memory

        return jax.lax.fori_loop(0, LAYERS, body, (jnp.zeros_like(x.z), memory))

    return layers


def measure(sizes: Sizes, tiles: Tiles, operands, bandwidth: float) -> dict:
    """Returns what one cut does: errors against the reference, and the time of all layers."""
    run = functools.partial(gdn_decode, tiles=tiles)
    layers = _all_layers(run, sizes)
    out, memory = layers(*operands)
    wanted, wanted_memory = _all_layers(gdn_decode_reference, sizes)(*operands)
    errors = dict(
        out=_error(out, wanted),
        **{
            field: max(
                _error(*pair)
                for pair in zip(
                    jax.tree.leaves(getattr(memory, field)),
                    jax.tree.leaves(getattr(wanted_memory, field)),
                    strict=True,
                )
            )
            for field in ("delta", "window", "pending")
        },
    )
    times = kernel_times_us(layers, *operands, name="gdn_decode", per_call=1)
    us = float(np.median(times))
    # States read and written; rows and windows are a tenth of that.
    num_bytes = 2 * operands[2].delta.nbytes
    return dict(
        splits=tiles.splits,
        errors=errors,
        right=max(errors.values()) < LIMIT,
        ms=us / 1e3,
        layer_us=us / LAYERS,
        gb_s=num_bytes / us / 1e3,
        share=num_bytes / us / 1e3 / bandwidth,
        spread_us=float(np.percentile(times, 90) - np.percentile(times, 10)),
        loop_us=wall_time_us(layers, *operands, repeats=3, calls=5),
    )


def _prefill_layers(run, sizes: Sizes):
    @jax.jit
    def layers(x, parameters, memory):
        counts = [jnp.int32(0), jnp.int32(0), jnp.int32(len(x.u))]

        def body(layer, carry):
            return run(x, parameters, carry[1], layer, *counts, sizes)

        return jax.lax.fori_loop(0, PREFILL_LAYERS, body, (jnp.zeros_like(x.z), memory))

    return layers


def measure_prefill(sizes: Sizes, bandwidth: float) -> dict:
    """Returns errors against the reference, and the time of one layer of a prompt's rows."""
    operands = gdn_operands(sizes, PREFILL_LAYERS, jax.random.key(1), PREFILL_ROWS)
    layers, reference = (
        _prefill_layers(run, sizes) for run in (gdn_prefill, gdn_prefill_reference)
    )
    (out, memory), (wanted, wanted_memory) = layers(*operands), reference(*operands)
    errors = dict(
        out=_error(out, wanted),
        delta=_error(memory.delta, wanted_memory.delta),
        window=_error(memory.window, wanted_memory.window),
    )
    us, peer_us = (
        float(np.median(kernel_times_us(run, *operands, name="", per_call=PREFILL_LAYERS)))
        for run in (layers, reference)
    )
    parts = {
        part: float(np.median(kernel_times_us(layers, *operands, name=f"gdn_prefill_{part}")))
        for part in ("rows", "mix", "scan", "norm")
    }
    # Rows that must be read and written, at least once.
    num_bytes = operands[0].u.nbytes + 2 * operands[0].z.nbytes
    return dict(
        errors=errors,
        right=max(errors.values()) < PREFILL_LIMIT,
        ms=us / 1e3,
        reference_ms=peer_us / 1e3,
        kernels_us=parts,
        gb_s=num_bytes / us / 1e3,
        share=num_bytes / us / 1e3 / bandwidth,
    )


def _prefill_figure(row: dict) -> Figure:
    return Figure(
        name="gdn_prefill",
        value=row["ms"],
        unit="ms",
        better="lower",
        must=PREFILL_MUST_MS,
        aim=PREFILL_AIM_MS,
        share_of_limit=row["share"],
        peer=row["reference_ms"],
    )


def main() -> None:
    """Measures every cut and files the figures of the default one and of prefill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    ptx.starts_early = False
    sizes = GDN_SIZES[-1]
    operands = gdn_operands(sizes, LAYERS, jax.random.key(0))
    bandwidth = read_bandwidth()
    reference = _all_layers(gdn_decode_reference, sizes)
    peer = float(np.median(kernel_times_us(reference, *operands, name="", per_call=1))) / 1e3
    rows = [measure(sizes, Tiles(splits=splits), operands, bandwidth) for splits in (4, 8)]
    for row in rows:
        print(json.dumps(row), flush=True)
    best = rows[0]
    figure = Figure(
        name="gdn_decode",
        value=best["ms"],
        unit="ms",
        better="lower",
        must=MUST_MS,
        aim=AIM_MS,
        share_of_limit=best["share"],
        peer=peer,
    )
    prefill = measure_prefill(sizes, bandwidth)
    print(json.dumps(prefill), flush=True)
    details = dict(cuts=rows, reference_ms=peer, prefill=prefill, read_gb_s=bandwidth)
    figures = [
        figure
        for row, figure in ((best, figure), (prefill, _prefill_figure(prefill)))
        if row["right"]
    ]
    record("bench/deltanet.py", figures, arguments.out, details)
    for row, limit in ((best, LIMIT), (prefill, PREFILL_LIMIT)):
        if not row["right"]:
            raise SystemExit(f"errors exceed {limit}: {row['errors']}")


if __name__ == "__main__":
    main()
