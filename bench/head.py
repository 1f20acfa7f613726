"""The vocabulary head that chooses as it multiplies: right first, then its share of the bandwidth.

`python -m bench.head [--out DIR]` writes `head.json` and the figures. A choice is right if it is
what plain JAX chooses from the logits of the same product. Times are CUPTI's, of the kernel alone,
with command buffers off: `XLA_FLAGS=--xla_gpu_enable_command_buffer=`; `step_us` is everything from
prepared rows to tokens, or to the best 64 of a row, in a chain.
"""

import argparse
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import make_tiles, read_bandwidth
from bench.summary import RESULTS, Figure, record
from bench.timing import kernel_times_us, wall_time_us
from pallas_kernels.decode_activations import Activations, prepare
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Tiles
from pallas_kernels.decode_head import (
    Adjustments,
    Best,
    HeadOperands,
    decode_head,
    decode_head_reference,
)
from pallas_kernels.decode_product import decode_product
from pallas_kernels.tile_choice import tiles_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadCase:
    """A head and a kind of choice.

    Attributes:
      name: of its figure.
      block: format of the weights.
      outputs, k: rows and columns of the weights.
      adjusted: whether there are penalties and bias.
      candidates: whether the best 64 are wanted.
      must, aim: shares of the read bandwidth; None for a case without bounds.
      rows: of the activations.
    """

    name: str
    block: str = "q6_k"
    outputs: int = 248320
    k: int = 5120
    adjusted: bool = False
    candidates: bool = False
    must: float | None = None
    aim: float | None = None
    rows: int = 8


CASES = [
    HeadCase(name="q6k_head", must=0.76, aim=0.90),
    HeadCase(name="q6k_head_top_64", candidates=True, must=0.76, aim=0.90),
    HeadCase(name="q6k_head_penalties", adjusted=True),
    HeadCase(name="q6k_head_penalties_top_64", adjusted=True, candidates=True),
    HeadCase(name="q4k_draft_head", block="q4_k", outputs=32768),
]


def head_operands(case: HeadCase) -> HeadOperands:
    """Returns penalties and bias of a third of the tokens, or none."""
    if not case.adjusted:
        return HeadOperands()
    keys = jax.random.split(jax.random.key(1), 3)
    often = jax.random.randint(keys[0], (case.outputs,), 0, 3).astype(jnp.uint32)
    row = jnp.arange(case.rows, dtype=jnp.int32)[:, None]
    drafts = jax.random.randint(keys[1], (8,), 0, case.outputs)
    adjustments = Adjustments(
        settings=jnp.asarray([2, 0.25, 0.75, 0], jnp.float32),
        bias=jax.random.normal(keys[2], (case.outputs,)),
        history=often,
        prefix=jnp.where(jnp.arange(8)[None] < row % 8, drafts[None], -1),
    )
    return HeadOperands(adjustments=adjustments)


def engine_tiles(case: HeadCase, device: str | None = None) -> Tiles:
    """Returns the cut that the engine takes on a device, by default on this one."""
    device = device or jax.devices()[0].device_kind
    return tiles_for(BLOCKS[case.block], case.outputs, case.k, case.rows, "choice", device)


def head_program(case: HeadCase, tiles: Tiles):
    """Returns a function of (prepared rows, weights, layer, operands)."""
    block = BLOCKS[case.block]

    def run(x, weights, layer, operands):
        return decode_head(
            x,
            weights,
            layer,
            block,
            tiles,
            operands,
            used=case.outputs - 100,
            candidates=case.candidates,
        )

    return run


def check(case: HeadCase, tiles: Tiles, prepared: Activations, weights: jax.Array) -> dict:
    """Returns whether the head chooses what plain JAX does from the logits, and does so again."""
    block, layer = BLOCKS[case.block], jnp.zeros((1,), jnp.int32)
    operands, run = head_operands(case), jax.jit(head_program(case, tiles))
    logits = jax.jit(lambda x, w: decode_product(x, w, layer, block, tiles))(prepared, weights)
    limits = dict(used=case.outputs - 100, candidates=case.candidates)
    want = jax.jit(functools.partial(decode_head_reference, **limits))(logits, operands)
    got, again = (run(prepared, weights, layer, operands) for _ in range(2))
    if isinstance(got, Best):
        same = bool(jnp.array_equal(got.column, want.column))
    else:
        # Units of unused rows alone have no maximum: minus infinity on both sides.
        off = jnp.where(got.maxima == want.maxima, 0, jnp.abs(got.maxima - want.maxima))
        same = bool(jnp.array_equal(got.logits, want.logits)) and float(off.max()) < 1e-5
    off_by = float(jnp.max(jnp.abs(got.log_sum - want.log_sum)))
    repeatable = all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(again)))
    return dict(
        same_choice=same,
        log_sum_error=off_by,
        repeatable=repeatable,
        right=same and repeatable and off_by < 1e-4,
    )


def measure(case: HeadCase, roof: float) -> dict:
    """Returns whether a case is right, its time and its share of the roof."""
    block, tiles = BLOCKS[case.block], engine_tiles(case)
    layers = max(1, 400_000_000 // (case.outputs // 16 * case.k // 256 * block.words * 4))
    weights = jnp.stack(
        [make_tiles(block, case.outputs, case.k, jnp.int32(i)) for i in range(layers)]
    )
    x = jax.random.normal(jax.random.key(3), (case.rows, case.k))
    prepared = jax.jit(prepare, static_argnums=1)(x, block)
    operands, checks = head_operands(case), check(case, tiles, prepared, weights)

    @jax.jit
    def loop(prepared, weights, operands):
        def body(i, total):
            at = jnp.full((1,), i % layers, jnp.int32)
            return total + head_program(case, tiles)(prepared, weights, at, operands).log_sum

        return jax.lax.fori_loop(0, 4 * layers, body, jnp.zeros(case.rows))

    us = float(np.median(kernel_times_us(loop, prepared, weights, operands, name="decode_product")))
    size = weights.nbytes / layers
    return dict(
        name=case.name,
        **checks,
        us=us,
        share=size / us / 1e3 / roof,
        step_us=wall_time_us(loop, prepared, weights, operands, repeats=3, calls=3) / (4 * layers),
    )


def main() -> None:
    """Measures the cases and writes their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    roof, rows, figures = read_bandwidth(), [], []
    for case in CASES:
        row = measure(case, roof)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if row["right"] and case.must is not None and case.aim is not None:
            figures.append(
                Figure(
                    name=case.name,
                    value=100 * row["share"],
                    unit="% of read bandwidth",
                    better="higher",
                    must=100 * case.must,
                    aim=100 * case.aim,
                    share_of_limit=row["share"],
                )
            )
    details = {"roof_gb_s": roof, "rows": rows}
    record("bench/head.py", figures, results=arguments.out, details=details)


if __name__ == "__main__":
    main()
