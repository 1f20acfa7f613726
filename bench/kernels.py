"""Decode products on a card: right first, then their time and share of the read bandwidth.

`python -m bench.kernels --out DIR [--sweep] [--only NAME ...]` writes `products.json`. Weights are
rotated over enough layers that the cache serves none; times are CUPTI's, of the kernel alone.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import device_name, kernel_times_us, wall_time_us
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_product import Tiles, decode_product, default_tiles, prepare

LIMIT = 2.5e-3
"""Largest relative RMS error against float32 with unrounded activations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A product of the issue's table: its name, sizes, and what share of the bandwidth it owes."""

    name: str
    block: str
    outputs: int
    k: int
    must: float
    aim: float
    rows: int = 8


CASES = [
    Case(name="q4k_gate_up", block="q4_k", outputs=34816, k=5120, must=0.72, aim=0.85),
    Case(name="q4k_down", block="q4_k", outputs=5120, k=17408, must=0.68, aim=0.82),
    Case(name="q4k_gdn_in", block="q4_k", outputs=16384, k=5120, must=0.64, aim=0.80),
    Case(name="q4k_attn_in", block="q4_k", outputs=14336, k=5120, must=0.64, aim=0.80),
    Case(name="q4k_out", block="q4_k", outputs=5120, k=6144, must=0.52, aim=0.72),
    Case(name="q6k_down", block="q6_k", outputs=5120, k=17408, must=0.72, aim=0.86),
    Case(name="q6k_head", block="q6_k", outputs=248320, k=5120, must=0.76, aim=0.90),
    Case(name="q5k_gate_up", block="q5_k", outputs=34816, k=5120, must=0.66, aim=0.82),
    Case(name="q8_gate_up", block="q8_0", outputs=34816, k=5120, must=0.76, aim=0.88),
]


def variants(k: int) -> list[Tiles]:
    """Returns cuts worth trying beside the default: parts of K where it is long."""
    return [
        Tiles(warpgroups=warpgroups, stages=stages, parts=parts, sharers=sharers, grid=grid)
        for parts, sharers, grid, warpgroups, stages in (
            (1, 1, 132, 3, 2),
            (1, 2, 132, 3, 2),
            (1, 2, 132, 3, 3),
            (1, 4, 120, 3, 2),
            (1, 4, 120, 3, 3),
            (1, 4, 120, 4, 2),
            (2, 1, 132, 3, 2),
            (2, 2, 120, 2, 2),
            (2, 2, 120, 3, 1),
            (4, 1, 120, 3, 2),
            (4, 1, 120, 3, 3),
            (4, 1, 120, 4, 2),
            (4, 2, 120, 3, 2),
        )
        if (parts > 1) == (k > 8192) or (parts, stages) == (2, 1)
    ]


def make_planes(block, outputs: int, k: int, layer: int) -> dict[str, jax.Array]:
    """Returns random planes of one layer, values of about 1e-2."""
    planes, key = {}, jax.random.fold_in(jax.random.key(7), layer)
    for i, (name, spec) in enumerate(block.format.plane_specs(outputs, k).items()):
        key_of_plane = jax.random.fold_in(key, i)
        if spec.dtype == np.float16:
            size = 1e-3 if name == "dmin" else 1e-4
            planes[name] = (size * jax.random.normal(key_of_plane, spec.shape)).astype(spec.dtype)
        else:
            bits = jax.random.bits(key_of_plane, spec.shape, jnp.uint8)
            if name in ("scales", "mins") and spec.dtype == np.uint8:
                bits &= 63
            planes[name] = jax.lax.bitcast_convert_type(bits, spec.dtype)
    return planes


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_tiles(block, outputs: int, k: int, layer: jax.Array) -> jax.Array:
    """Returns the random weights of one layer in tile order."""
    return block.tile(make_planes(block, outputs, k, layer))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _reference(block, outputs: int, k: int, layer: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.matmul(
        x, block.format.unpack(make_planes(block, outputs, k, layer)).T, precision="highest"
    )


def _error(got: jax.Array, want: jax.Array) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def inputs(case: Case) -> dict[str, jax.Array]:
    """Returns activations to check with: plain, and with a few channels 1,000 times larger."""
    plain = jax.random.normal(jax.random.key(3), (case.rows, case.k))
    channels = jax.random.choice(jax.random.key(4), case.k, (5,), replace=False)
    return {"plain": plain, "outliers": plain.at[:, channels].multiply(1000)}


def check(case: Case, block, weights: jax.Array, run) -> dict:
    """Returns errors and bit-equality of a product `run(x, weights, layer)`."""
    layer, report = weights.shape[0] - 1, {}
    for name, x in inputs(case).items():
        want = _reference(block, case.outputs, case.k, jnp.int32(layer), x)
        got = run(x, weights, jnp.full((1,), layer, jnp.int32))
        report[f"error_{name}"] = _error(got, want)
        again = run(x, weights, jnp.full((1,), layer, jnp.int32))
        other = run(x.at[1:].multiply(-3), weights, jnp.full((1,), layer, jnp.int32))
        report[f"repeatable_{name}"] = bool(jnp.array_equal(got, again))
        report[f"row_invariant_{name}"] = bool(jnp.array_equal(got[0], other[0]))
    report["right"] = all(
        value < LIMIT if key.startswith("error") else value for key, value in report.items()
    )
    return report


def read_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Returns GB/s of a plain reduction over this many bytes, the roof of this run."""
    data = [jax.random.bits(jax.random.key(i), (num_bytes // 4,)) for i in range(2)]
    run = jax.jit(lambda parts: [jnp.bitwise_xor.reduce(part) for part in parts])
    times = kernel_times_us(run, data, name="", per_call=2)
    return num_bytes / float(np.median(times)) / 1e3


def measure(case: Case, roof: float, cuts: list[Tiles], deadline: float) -> list[dict]:
    """Returns a row for each cut of a case that fits the card."""
    block = BLOCKS[case.block]
    unit_words = case.k // 256 * block.words
    layer_bytes = case.outputs // 16 * unit_words * 4
    layers = max(3, -(-200_000_000 // layer_bytes)) if layer_bytes < 500_000_000 else 2
    weights = jnp.stack(
        [make_tiles(block, case.outputs, case.k, jnp.int32(i)) for i in range(layers)]
    )
    rows = []
    for tiles in cuts:
        if time.monotonic() > deadline:
            print("out of time at", case.name, tiles, flush=True)
            break
        row = dict(name=case.name, tiles=dataclasses.asdict(tiles), layer_bytes=layer_bytes)
        try:
            row |= _measure_cut(case, block, weights, tiles, layers, layer_bytes, roof)
        except Exception as error:  # noqa: BLE001 (one bad cut must not end a sweep)
            text = str(error).replace("\n", " ")
            if "CUDA_ERROR" in text:
                raise
            if "shared memory" not in text:
                print(case.name, tiles, type(error).__name__, text[:300], flush=True)
            continue
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _measure_cut(case, block, weights, tiles, layers, layer_bytes, roof) -> dict:
    def product(x, weights, layer):
        return decode_product(prepare(x, block), weights, layer, block, tiles)

    start = time.monotonic()
    run = jax.jit(product)
    x = inputs(case)["plain"]
    layer = jnp.zeros((1,), jnp.int32)
    run.lower(x, weights, layer).compile()
    report = dict(compile_s=time.monotonic() - start) | check(case, block, weights, run)

    @jax.jit
    def loop(x, weights):
        activations = prepare(x, block)

        def body(i, y):
            one = jnp.full((1,), i, jnp.int32)
            return y + decode_product(activations, weights, one, block, tiles)[:, :128]

        return jax.lax.fori_loop(0, layers, body, jnp.zeros((case.rows, 128)))

    times = kernel_times_us(loop, x, weights, name="decode_product")
    us = float(np.median(times))
    return report | dict(
        us=us,
        gb_s=layer_bytes / us / 1e3,
        share=layer_bytes / us / 1e3 / roof,
        spread_us=float(np.percentile(times, 90) - np.percentile(times, 10)),
        loop_us=wall_time_us(loop, x, weights, repeats=3, calls=5) / layers,
    )


def main() -> None:
    """Measures the cases and writes `products.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="all cuts, not the default alone")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=240, help="stop a sweep after this long")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    roof = read_bandwidth()
    print("roof", roof, flush=True)
    rows = []
    for case in CASES:
        if case.block not in BLOCKS or (arguments.only and case.name not in arguments.only):
            continue
        cuts = [default_tiles(BLOCKS[case.block], case.outputs, case.k, case.rows)]
        cuts += [cut for cut in variants(case.k) if cut not in cuts] if arguments.sweep else []
        rows += measure(case, roof, cuts, deadline)
        document = dict(device=device_name(), roof_gb_s=roof, rows=rows)
        (arguments.out / "products.json").write_text(json.dumps(document, indent=1))
    for row in sorted(rows, key=lambda r: (r["name"], r["us"])):
        tiles = row["tiles"]
        print(
            f"{row['name']:12} wg {tiles['warpgroups']} st {tiles['stages']} parts {tiles['parts']}"
            f" sharers {tiles['sharers']}: {row['us']:7.2f} us {row['gb_s']:5.0f} GB/s"
            f" {100 * row['share']:5.1f} %  loop {row['loop_us']:6.1f} us"
            f" error {row['error_plain']:.1e} {row['error_outliers']:.1e} right {row['right']}"
        )


if __name__ == "__main__":
    main()
