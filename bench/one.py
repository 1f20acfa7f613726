"""Launches one decode product a few times, for a profiler: `python -m bench.one NAME [TILES]`."""

import ast
import sys

import jax
import jax.numpy as jnp

from bench.kernels import CASES, FORMAT_CASES, inputs, make_tiles
from pallas_kernels.decode_activations import prepare
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Tiles, default_tiles
from pallas_kernels.decode_product import decode_product


def main(name: str, text: str = "{}") -> None:
    """Runs the product over three layers, twice."""
    case = next(c for c in CASES + FORMAT_CASES if c.name == name)
    block, changes = BLOCKS[case.block], ast.literal_eval(text)
    tiles = Tiles(**changes) if changes else default_tiles(block, case.outputs, case.k, case.rows)
    weights = jnp.stack([make_tiles(block, case.outputs, case.k, jnp.int32(i)) for i in range(3)])
    activations = jax.jit(prepare, static_argnums=1)(inputs(case)["plain"], block)
    run = jax.jit(lambda x, w, layer: decode_product(x, w, layer, block, tiles, case.epilogue))
    for i in range(6):
        run(activations, weights, jnp.full((1,), i % 3, jnp.int32)).block_until_ready()


if __name__ == "__main__":
    main(*sys.argv[1:])
