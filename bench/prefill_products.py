"""Prefill products on a card: right first, then their rate.

`python -m bench.prefill_products [--out DIR] [--sweep]` writes `prefill_products.json` and, unless
it sweeps over stages, the figures. Times are CUPTI's, of the kernel alone, with command buffers
off: `XLA_FLAGS=--xla_gpu_enable_command_buffer=`; `with_activations_us` adds what prepares the
activations.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import LIMIT, make_planes, make_tiles
from bench.summary import RESULTS, Figure, record
from bench.timing import kernel_times_us, wall_time_us
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Epilogue
from pallas_kernels.prefill_product import PrefillTiles, prefill_activations, prefill_product

_PEAK = 989e12
"""Dense float16 operations a second of an H200, by its data sheet."""

_SAMPLE = 512
"""Outputs of the reference, which takes the whole matrix in float32 otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCase:
    """A product of many rows.

    Attributes:
      name: of its figure.
      block: format of the weights.
      outputs, k: rows and columns of the weights.
      rows: of the activations.
      epilogue: what is made of the outputs.
      must, aim: TFLOP/s; None for a case without bounds.
    """

    name: str
    block: str
    outputs: int
    k: int
    rows: int = 2048
    epilogue: Epilogue = "none"
    must: float | None = None
    aim: float | None = None


_gate_up = functools.partial(PrefillCase, outputs=34816, k=5120, epilogue="silu_gate")

CASES = [
    _gate_up(name="prefill_gate_up", block="q4_k", must=400, aim=600),
    PrefillCase(name="prefill_down", block="q6_k", outputs=5120, k=17408),
    PrefillCase(name="prefill_gdn_in", block="q4_k", outputs=16384, k=5120),
    _gate_up(name="prefill_gate_up_q5k", block="q5_k"),
    _gate_up(name="prefill_gate_up_q8", block="q8_0"),
    _gate_up(name="prefill_gate_up_512", block="q4_k", rows=512),
    _gate_up(name="prefill_gate_up_64", block="q4_k", rows=64),
]


def prefill_program(case: PrefillCase, tiles: PrefillTiles | None = None):
    """Returns a function of (prepared activations, weights, layer)."""
    block = BLOCKS[case.block]

    def run(x, weights, layer):
        return prefill_product(x, weights, layer, block, case.epilogue, tiles)

    return run


def _inputs(case: PrefillCase) -> dict[str, jax.Array]:
    plain = jax.random.normal(jax.random.key(3), (case.rows, case.k))
    channels = jax.random.choice(jax.random.key(4), case.k, (5,), replace=False)
    return {"plain": plain, "outliers": plain.at[:, channels].multiply(1000)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reference(case: PrefillCase, first: int, x: jax.Array) -> jax.Array:
    """Returns outputs of some rows of W, from `first` on, in float32."""
    block = BLOCKS[case.block]
    planes = make_planes(block, case.outputs, case.k, jnp.int32(0))
    some = {name: plane[first : first + _SAMPLE] for name, plane in planes.items()}
    out = jnp.matmul(x, block.format.unpack(some).T, precision="highest")
    if case.epilogue == "none":
        return out
    gate, up = jnp.split(out.reshape(case.rows, -1, 16), 2, axis=-1)
    return (jax.nn.silu(gate) * up).reshape(case.rows, -1)


def check(case: PrefillCase, run, weights: jax.Array) -> dict:
    """Returns errors at both ends of the outputs, and whether rows stand alone and repeat."""
    layer, report = jnp.zeros((1,), jnp.int32), {}
    prepare = jax.jit(prefill_activations)
    share = 1 if case.epilogue == "none" else 2
    for name, x in _inputs(case).items():
        got = run(prepare(x), weights, layer)
        for place, first in (("", 0), ("_end", case.outputs - _SAMPLE)):
            want = np.asarray(_reference(case, first, x), np.float64)
            part = np.asarray(got[:, first // share :][:, : want.shape[1]], np.float64)
            off = np.sqrt(np.mean((part - want) ** 2) / np.mean(want**2))
            report[f"error_{name}{place}"] = float(off)
        again = run(prepare(x), weights, layer)
        other = run(prepare(x.at[1:].multiply(-3)), weights, layer)
        report[f"repeatable_{name}"] = bool(jnp.array_equal(got, again))
        report[f"row_invariant_{name}"] = bool(jnp.array_equal(got[0], other[0]))
    report["right"] = all(
        value < LIMIT if key.startswith("error") else value for key, value in report.items()
    )
    return report


def measure(case: PrefillCase, tiles: PrefillTiles) -> dict:
    """Returns errors, time and rate of a case."""
    block, layer = BLOCKS[case.block], jnp.zeros((1,), jnp.int32)
    weights = make_tiles(block, case.outputs, case.k, jnp.int32(0))[None]
    run = jax.jit(prefill_program(case, tiles))
    report = dict(name=case.name, tiles=dataclasses.asdict(tiles)) | check(case, run, weights)
    x = _inputs(case)["plain"]
    prepared = jax.jit(prefill_activations)(x)
    us = float(np.median(kernel_times_us(run, prepared, weights, layer, name="prefill_product")))
    both = jax.jit(
        lambda x, w, layer: prefill_program(case, tiles)(prefill_activations(x), w, layer)
    )
    rate = 2 * case.rows * case.outputs * case.k / us / 1e6
    return report | dict(
        us=us,
        tflop_s=rate,
        share=rate * 1e12 / _PEAK,
        with_activations_us=wall_time_us(both, x, weights, layer, repeats=3, calls=5),
    )


def main() -> None:
    """Measures the cases and writes `prefill_products.json`, and figures unless it sweeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--sweep", action="store_true", help="several numbers of stages")
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    choices = [PrefillTiles()]
    if arguments.sweep:
        pairs = itertools.product((2, 3, 4, 5), (2, 3))
        choices = [PrefillTiles(slices=slices, blocks=blocks) for slices, blocks in pairs]
    rows, figures = [], []
    for case, tiles in itertools.product(CASES, choices):
        if arguments.only and case.name not in arguments.only:
            continue
        try:
            row = measure(case, tiles)
        except ValueError as error:
            if "shared memory" not in str(error):
                raise
            continue
        rows.append(row)
        print(json.dumps(row), flush=True)
        if row["right"] and case.must is not None:
            figures.append(
                Figure(
                    name=case.name,
                    value=row["tflop_s"],
                    unit="TFLOP/s",
                    better="higher",
                    must=case.must,
                    aim=case.aim,
                    share_of_limit=row["share"],
                )
            )
    if not arguments.sweep:
        record("bench/prefill_products.py", figures, arguments.out, details={"rows": rows})


if __name__ == "__main__":
    main()
