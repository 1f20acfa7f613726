"""Finds cuts of decode products that beat the rule of thumb, and files them for the engine.

    python -m bench.tune [--only NAME ...] [--seconds 120] [--out DIR]   on a GPU
    python -m bench.tune --from-sweeps [--out DIR]      from recorded sweeps, on any machine

A cut is tried if it keeps the parts of K of the default. It is dropped, with a line that says so,
unless it gives the default's bits in every layer, twice, with plain rows and with outliers; and the
default itself is checked against the reference first. Times are CUPTI's, as in `kernels.py`
(`XLA_FLAGS=--xla_gpu_enable_command_buffer=`), the default measured again before every cut. A cut
wins if it beats the default of its own moment by more than 2 %, and by more than the default
differs from itself, in two rounds; of several, the one with the best worst round. Without a winner
the default stays.

Winners go to `pallas_kernels/tuned_tiles/<device>.json`, where those of products that were not
measured stay; what was measured goes to `bench/results/<device>/tune.json`. With `--out` both go
there.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench import head
from bench.kernels import check, inputs, make_layers
from bench.manifest import device_folder, manifest
from bench.summary import RESULTS
from bench.timing import kernel_times_us
from bench.tune_choice import (
    MARGIN,
    ROUNDS,
    SUBJECTS,
    Comparison,
    Subject,
    candidates,
    choose,
    document,
    from_sweeps,
    spread,
    winner_of,
)
from pallas_kernels.decode_activations import prepare
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Tiles
from pallas_kernels.decode_product import decode_product
from pallas_kernels.tile_choice import FOLDER, device_file, read_winners


def every_layer(subject: Subject, tiles: Tiles):
    """Returns a function of (prepared rows, weights) that gives the outputs of all layers."""
    case, block = subject.case, BLOCKS[subject.case.block]
    if subject.choosing is None:

        def run(x, weights, layer):
            return decode_product(x, weights, layer, block, tiles, case.epilogue)
    else:
        operands = head.head_operands(subject.choosing)
        run = functools.partial(head.head_program(subject.choosing, tiles), operands=operands)

    def outputs(x, weights):
        layers = jnp.arange(weights.shape[0], dtype=jnp.int32)[:, None]
        return jax.lax.map(lambda layer: run(x, weights, layer), layers)

    return jax.jit(outputs)


def same_bits(some: Any, others: Any) -> bool:
    """Returns whether all arrays of two trees have the same bits."""

    def bits(tree: Any) -> list[jax.Array]:
        return [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in jax.tree.leaves(tree)]

    return all(bool(jnp.array_equal(*pair)) for pair in zip(bits(some), bits(others), strict=True))


def is_right(subject: Subject, tiles: Tiles, weights: jax.Array) -> bool:
    """Returns whether a product agrees with its reference under a cut."""
    case, block = subject.case, BLOCKS[subject.case.block]
    if subject.choosing is not None:
        prepared = jax.jit(prepare, static_argnums=1)(inputs(case)["plain"], block)
        return head.check(subject.choosing, tiles, prepared, weights)["right"]

    def run(x, weights, layer):
        return decode_product(prepare(x, block), weights, layer, block, tiles, case.epilogue)

    return check(case, block, weights, jax.jit(run))["right"]


def tune(subject: Subject, deadline: float) -> tuple[list[dict], Comparison | None]:
    """Returns a row for each cut that was tried, and the winner if there is one.

    Raises:
      ValueError: the default is wrong.
    """
    case, product = subject.case, subject.product
    weights = make_layers(case.block, case.outputs, case.k)
    if not is_right(subject, product.default, weights):
        raise ValueError(f"{case.name}: the default {product.default} is wrong; nothing is tuned")
    prepare_once = jax.jit(prepare, static_argnums=1)
    prepared = [prepare_once(x, BLOCKS[case.block]) for x in inputs(case).values()]
    default = every_layer(subject, product.default)
    wanted = [default(x, weights) for x in prepared]
    runs, rows = {}, {}
    for tiles in candidates(product):
        if time.monotonic() > deadline:
            print(f"{case.name}: out of time; not tried from {tiles} on", flush=True)
            break
        rows[tiles] = {"name": case.name, "tiles": dataclasses.asdict(tiles)}
        run = every_layer(subject, tiles)
        rows[tiles]["same_bits"] = right = _agrees(run, prepared, weights, wanted)
        if right is True:
            runs[tiles] = run
        else:
            print(f"{case.name}: dropped {tiles}: {right or 'other bits'}", flush=True)
    compared, noise = _race(default, runs, prepared[0], weights)
    for cut in compared:
        rows[cut.tiles] |= {"us": cut.us, "default_us": cut.default_us}
    for row in rows.values():
        print(json.dumps(row), flush=True)
    return list(rows.values()), choose(compared, noise)


def _agrees(run, prepared, weights: jax.Array, wanted: Sequence[Any]) -> bool | str:
    """Returns whether a cut gives the wanted bits, twice; or why it does not run."""
    try:
        pairs = 2 * list(zip(prepared, wanted, strict=True))
        return all(same_bits(run(x, weights), want) for x, want in pairs)
    except Exception as error:  # noqa: BLE001 (one bad cut must not end the others)
        text = str(error).replace("\n", " ")
        if "CUDA_ERROR" in text:
            raise
        return f"{type(error).__name__}: {text[:300]}"


def _race(default, runs: dict, x, weights: jax.Array) -> tuple[list[Comparison], float]:
    """Returns what cuts took beside the default, and by how much that differed from itself."""

    def time_of(run) -> float:
        return statistics.median(kernel_times_us(run, x, weights, name="decode_product"))

    compared = {tiles: Comparison(tiles=tiles, us=(), default_us=()) for tiles in runs}
    hopeful, noise = list(runs), 0.0
    for _ in range(ROUNDS):
        defaults = []
        for tiles in hopeful:
            defaults.append(time_of(default))
            old, us = compared[tiles], time_of(runs[tiles])
            compared[tiles] = Comparison(
                tiles=tiles, us=(*old.us, us), default_us=(*old.default_us, defaults[-1])
            )
        if defaults:
            noise = max(noise, spread([*defaults, time_of(default)]))
        hopeful = [tiles for tiles in hopeful if choose([compared[tiles]], rounds=1)]
    return list(compared.values()), noise


def main() -> None:
    """Tunes the cases, or reads the sweeps, and writes winners."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [subject.case.name for subject in SUBJECTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--seconds", type=float, default=120, help="try no more cuts after this long"
    )
    parser.add_argument("--out", type=pathlib.Path, help="a folder for all that is written")
    parser.add_argument("--from-sweeps", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    tuned = arguments.out or FOLDER
    tuned.mkdir(parents=True, exist_ok=True)
    if arguments.from_sweeps:
        paths = sorted(RESULTS.glob("h200/products_sweep_*.json"))
        device, about, winners = from_sweeps(paths)
        (tuned / device_file(device)).write_text(document(device, about, winners))
        print(about)
        return
    _tune_all(
        [s for s in SUBJECTS if s.case.name in arguments.only],
        arguments.seconds,
        tuned,
        arguments.out or RESULTS / device_folder(),
    )


def _tune_all(
    subjects: Sequence[Subject], seconds: float, tuned: pathlib.Path, results: pathlib.Path
) -> None:
    """Tunes one product after the other, and writes after each."""
    device, facts = jax.devices()[0].device_kind, manifest()
    filed = FOLDER / device_file(device)
    winners = read_winners(filed) if filed.exists() else {}
    rows, deadline = [], time.monotonic() + seconds
    results.mkdir(parents=True, exist_ok=True)
    for subject in subjects:
        if time.monotonic() > deadline:
            print(f"{subject.case.name}: out of time; it keeps what it had", flush=True)
            continue
        tried, cut = tune(subject, deadline)
        rows += tried
        earlier = winners.get(subject.product)
        if cut:
            won = winner_of(subject.product, cut, facts["commit"], facts["date"])
            winners[subject.product] = won
        elif earlier and dataclasses.asdict(earlier.tiles) in [row["tiles"] for row in tried]:
            del winners[subject.product]
        print(f"{subject.case.name}: {cut or 'the default stays'}", flush=True)
        measured = {"manifest": facts, "margin": MARGIN, "rows": rows}
        (results / "tune.json").write_text(json.dumps(measured, indent=1) + "\n")
        about = (
            f"Measured by bench/tune.py: a winner gave the default's bits and beat it by more than "
            f"{MARGIN:.0%} in {ROUNDS} rounds. What is not listed keeps the default."
        )
        text = document(device, about, winners.values())
        (tuned / device_file(device)).write_text(text)


if __name__ == "__main__":
    main()
