"""What comes before a product, in one launch or as XLA's kernels: right first, then its time.

`python -m bench.inputs [--out DIR]` writes `inputs.json` and the figures. Both ways run in a loop
on the device, each turn on the result of the last: a figure is the kernels' time of a turn, its
peer that of plain JAX's. Command buffers off: `XLA_FLAGS=--xla_gpu_enable_command_buffer=`.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.summary import RESULTS, Figure, record
from bench.timing import kernel_times_us
from pallas_kernels import ptx
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_inputs import Inputs, decode_inputs, decode_inputs_reference

_EPS, _TURNS = 1e-6, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputsCase:
    """Rows before a product.

    Attributes:
      name: of its figure.
      block: format of the product's weights.
      k: width of the rows.
      rows: of the activations.
      added, normed: whether there are a residual add and a norm.
    """

    name: str
    block: str
    k: int
    rows: int = 8
    added: bool = True
    normed: bool = True


CASES = [
    InputsCase(name="inputs_us", block="q4_k", k=5120),
    InputsCase(name="inputs_q6k_us", block="q6_k", k=5120),
    InputsCase(name="inputs_down_us", block="q4_k", k=17408, added=False, normed=False),
    InputsCase(name="inputs_16_rows_us", block="q4_k", k=5120, rows=16),
]


def make_inputs(case: InputsCase) -> dict[str, jax.Array]:
    """Returns random operands."""
    keys = jax.random.split(jax.random.key(0), 3)
    operands = {"x": jax.random.normal(keys[0], (case.rows, case.k)).at[:, 5].multiply(1000)}
    if case.added:
        operands["added"] = jax.random.normal(keys[1], (case.rows, case.k))
    if case.normed:
        operands["norm"] = 1 + 0.1 * jax.random.normal(keys[2], (3, case.k))
        operands["layer"] = jnp.ones((1,), jnp.int32)
    return operands


def run_inputs(case: InputsCase, operands, op: Any = decode_inputs):
    """Returns the fields of the result."""
    made: Inputs = op(**operands, block=BLOCKS[case.block], eps=_EPS)
    return made.stream, made.normed, made.activations


def _looped(case: InputsCase, op):
    """Returns a program of many turns, each of which reads what the one before wrote."""

    def turn(_, carry):
        operands, _ = carry
        stream, normed, activations = run_inputs(case, operands, op)
        scale = activations.scales[:, None] * 0 + jnp.float32(0.5)
        return operands | {"x": stream * scale}, (normed, activations)

    def run(operands):
        last = run_inputs(case, operands, op)[1:]
        return jax.lax.fori_loop(0, _TURNS, turn, (operands, last))

    return jax.jit(run)


def measure(case: InputsCase) -> dict:
    """Returns whether the kernel is right, and the time of a turn both ways."""
    operands = make_inputs(case)
    got, want = (
        jax.jit(functools.partial(run_inputs, case, op=op))(operands)
        for op in (decode_inputs, decode_inputs_reference)
    )
    off = [
        float(jnp.max(jnp.abs(a - b) / (jnp.abs(b) + 1e-6)))
        for a, b in zip(got[:2], want[:2], strict=True)
    ]
    values = [
        np.asarray(made[2].blocks)[:, : 1024 * case.rows // 8].view(np.float16).astype(np.float64)
        for made in (got, want)
    ]
    off_by = float(np.max(np.abs(values[0] - values[1])))
    return dict(
        name=case.name,
        largest_relative_error=max(off),
        largest_operand_error=off_by,
        right=max(off) < 1e-5 and off_by <= 2.0**-5,
        us=_turn_us(_looped(case, decode_inputs), operands),
        plain_us=_turn_us(_looped(case, decode_inputs_reference), operands),
    )


def _turn_us(run, operands) -> float:
    return float(np.median(kernel_times_us(run, operands, name="", per_call=_TURNS)))


def main() -> None:
    """Measures the cases and writes their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    ptx.starts_early = False
    rows = [measure(case) for case in CASES]
    for row in rows:
        print(json.dumps(row), flush=True)
    figures = [
        Figure(name=row["name"], value=row["us"], unit="us", better="lower", peer=row["plain_us"])
        for row in rows
        if row["right"]
    ]
    record("bench/inputs.py", figures, results=arguments.out, details={"rows": rows})


if __name__ == "__main__":
    main()
