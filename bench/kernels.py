"""Decode products on a card: right first, then their time and share of the read bandwidth.

`python -m bench.kernels [--out DIR] [--sweep] [--formats] [--only NAME ...]` writes `products.json`
and, unless it sweeps, the figures. Weights are rotated over enough layers that the cache serves
none; times are CUPTI's, of the kernel alone, with command buffers off:
`XLA_FLAGS=--xla_gpu_enable_command_buffer=`.
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

from bench.manifest import device_folder, manifest
from bench.summary import RESULTS, Figure, record
from bench.timing import kernel_times_us, wall_time_us
from pallas_kernels.decode_activations import prepare
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Epilogue, Tiles, default_tiles
from pallas_kernels.decode_product import decode_product
from pallas_kernels.tile_choice import tiles_for

LIMIT = 2.5e-3
"""Largest relative RMS error against float32 with unrounded activations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A product: sizes, and the share of the read bandwidth it must and should reach.

    Attributes:
      name: of its figure.
      block: format of the weights.
      outputs, k: rows and columns of the weights.
      must, aim: shares; None for a case that is only checked.
      rows: of the activations.
      epilogue: what is made of the outputs.
    """

    name: str
    block: str
    outputs: int
    k: int
    must: float | None = None
    aim: float | None = None
    rows: int = 8
    epilogue: Epilogue = "none"


def _gate_up(name: str, block: str, must: float | None, aim: float | None, rows: int = 8) -> Case:
    return Case(
        name=name,
        block=block,
        outputs=34816,
        k=5120,
        must=must,
        aim=aim,
        rows=rows,
        epilogue="silu_gate",
    )


CASES = [
    _gate_up("q4k_gate_up", "q4_k", 0.72, 0.85),
    Case(name="q4k_down", block="q4_k", outputs=5120, k=17408, must=0.68, aim=0.82),
    Case(name="q4k_gdn_in", block="q4_k", outputs=16384, k=5120, must=0.64, aim=0.80),
    Case(name="q4k_attn_in", block="q4_k", outputs=14336, k=5120, must=0.64, aim=0.80),
    Case(name="q4k_out", block="q4_k", outputs=5120, k=6144, must=0.52, aim=0.72),
    Case(name="q6k_down", block="q6_k", outputs=5120, k=17408, must=0.72, aim=0.86),
    Case(name="q6k_head_logits", block="q6_k", outputs=248320, k=5120),
    _gate_up("q5k_gate_up", "q5_k", 0.66, 0.82),
    _gate_up("q8_gate_up", "q8_0", 0.76, 0.88),
    _gate_up("q4k_gate_up_16_rows", "q4_k", None, None, rows=16),
]

FORMAT_CASES = [
    _gate_up(name, block, None, None)
    for name, block in (
        ("q4_0_gate_up", "q4_0"),
        ("q4_1_gate_up", "q4_1"),
        ("q5_1_gate_up", "q5_1"),
        ("q2k_gate_up", "q2_k"),
        ("q3k_gate_up", "q3_k"),
        ("iq4nl_gate_up", "iq4_nl"),
        ("iq4xs_gate_up", "iq4_xs"),
        ("iq3s_gate_up", "iq3_s"),
        ("iq3xxs_gate_up", "iq3_xxs"),
        ("iq2_gate_up", "iq2"),
        ("iq1_gate_up", "iq1"),
        ("mxfp4_gate_up", "mxfp4"),
        ("nvfp4_gate_up", "nvfp4"),
    )
]
"""The other formats: measured with `--formats`, or by name."""


def variants(k: int) -> list[Tiles]:
    """Returns cuts worth trying beside the default: parts of K where it is long."""
    return [
        Tiles(warpgroups=warpgroups, stages=stages, parts=parts, sharers=sharers, grid=grid)
        for parts, sharers, grid, warpgroups, stages in (
            (1, 1, 132, 3, 2),
            (1, 1, 132, 3, 3),
            (1, 1, 132, 2, 3),
            (1, 2, 132, 3, 2),
            (2, 1, 132, 3, 2),
            (2, 1, 132, 3, 1),
            (2, 1, 132, 2, 2),
            (4, 1, 120, 3, 2),
        )
        if (parts > 1) == (k > 8192)
    ]


def make_planes(block, outputs: int, k: int, layer: jax.Array) -> dict[str, jax.Array]:
    """Returns random planes of one layer, values of about 1e-2."""
    planes, key = {}, jax.random.fold_in(jax.random.key(7), layer)
    for i, (name, spec) in enumerate(block.format.plane_specs(outputs, k).items()):
        key_of_plane = jax.random.fold_in(key, i)
        if jnp.issubdtype(spec.dtype, jnp.floating):
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


def make_layers(name: str, outputs: int, k: int) -> jax.Array:
    """Returns the weights of more layers than the cache holds, or two of a head."""
    block = BLOCKS[name]
    layer_bytes = outputs // 16 * (k // 256 * block.words) * 4
    layers = max(3, -(-200_000_000 // layer_bytes)) if layer_bytes < 500_000_000 else 2
    return jnp.stack([make_tiles(block, outputs, k, jnp.int32(i)) for i in range(layers)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reference(case: Case, block, layer: jax.Array, x: jax.Array) -> jax.Array:
    weights = block.format.unpack(make_planes(block, case.outputs, case.k, layer))
    out = jnp.matmul(x, weights.T, precision="highest")
    if case.epilogue == "none":
        return out
    gate, up = jnp.split(out.reshape(case.rows, -1, 16), 2, axis=-1)
    return (jax.nn.silu(gate) * up).reshape(case.rows, -1)


def _error(got: jax.Array, want: jax.Array) -> float:
    true = np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((np.asarray(got, np.float64) - true) ** 2) / np.mean(true**2)))


def inputs(case: Case) -> dict[str, jax.Array]:
    """Returns activations to check with: plain, and with a few channels 1,000 times larger."""
    plain = jax.random.normal(jax.random.key(3), (case.rows, case.k))
    channels = jax.random.choice(jax.random.key(4), case.k, (5,), replace=False)
    return {"plain": plain, "outliers": plain.at[:, channels].multiply(1000)}


def check(case: Case, block, weights: jax.Array, run) -> dict:
    """Returns errors and bit-equality of a product `run(x, weights, layer)`."""
    layer, report = weights.shape[0] - 1, {}
    for name, x in inputs(case).items():
        want = _reference(case, block, jnp.int32(layer), x)
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
    block, weights = BLOCKS[case.block], make_layers(case.block, case.outputs, case.k)
    layers, layer_bytes = len(weights), weights.nbytes // len(weights)
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
        return decode_product(prepare(x, block), weights, layer, block, tiles, case.epilogue)

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
            out = decode_product(activations, weights, one, block, tiles, case.epilogue)
            return y + out[:, :128]

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


def figures(rows: list[dict]) -> list[Figure]:
    """Returns the figures of measured rows, those of wrong products left out."""
    cases = {case.name: case for case in CASES + FORMAT_CASES}
    return [
        Figure(
            name=row["name"],
            value=100 * row["share"],
            unit="% of read bandwidth",
            better="higher",
            must=100 * case.must,
            aim=100 * case.aim,
            share_of_limit=row["share"],
        )
        for row in rows
        if row["right"] and (case := cases[row["name"]]).must is not None and case.aim is not None
    ]


def _line(row: dict) -> str:
    tiles = row["tiles"]
    return (
        f"{row['name']:19} wg {tiles['warpgroups']} st {tiles['stages']} parts {tiles['parts']}"
        f" sharers {tiles['sharers']}: {row['us']:7.2f} us {row['gb_s']:5.0f} GB/s"
        f" {100 * row['share']:5.1f} %  loop {row['loop_us']:6.1f} us"
        f" error {row['error_plain']:.1e} {row['error_outliers']:.1e} right {row['right']}"
    )


def main() -> None:
    """Measures the cases and writes `products.json`, and figures unless it sweeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument(
        "--sweep", action="store_true", help="other cuts too, not the engine's alone"
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--formats", action="store_true", help="the other formats too")
    parser.add_argument("--seconds", type=float, default=240, help="stop a sweep after this long")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    roof = read_bandwidth()
    print("roof", roof, flush=True)
    rows = []
    for case in CASES + (FORMAT_CASES if arguments.formats or arguments.only else []):
        if arguments.only and case.name not in arguments.only:
            continue
        block, device = BLOCKS[case.block], jax.devices()[0].device_kind
        cuts = [tiles_for(block, case.outputs, case.k, case.rows, case.epilogue, device)]
        if arguments.sweep:
            others = [default_tiles(block, case.outputs, case.k, case.rows), *variants(case.k)]
            cuts += [cut for cut in others if cut not in cuts]
        rows += measure(case, roof, cuts, deadline)
        document = json.dumps(dict(manifest=manifest(), roof_gb_s=roof, rows=rows), indent=1)
        folder = arguments.out / device_folder()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "products.json").write_text(document)
    for row in sorted(rows, key=lambda r: (r["name"], r["us"])):
        print(_line(row))
    if not arguments.sweep:
        record("bench/kernels.py", figures(rows), results=arguments.out)


if __name__ == "__main__":
    main()
