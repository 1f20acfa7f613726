"""Restoring a checkpoint, beside reading the same bytes from the page cache and beside orbax.

    python -m bench.restore CHECKPOINT [--runs 5]

Reading alone is plain `read` of every weight file into one buffer, over and over, on one thread: no
memory is touched that was not touched before. Restoring ends with weights on the device, every byte
checked. They take turns, after one that fills the page cache, and the best of each counts, as other
work on the machine only slows them. Gate: restoring verifies the checksum of every plane.
"""

import argparse
import pathlib
import time
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from bench.summary import Figure, record
from openjet_jax.checkpoint import read_config
from openjet_jax.stacks import load_weights

BUFFER_BYTES = 2**20


def best_seconds(runs: int, *actions: Callable[[], object]) -> list[float]:
    """Returns the shortest time of each action; they take turns, and the first does not count."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(runs + 1):
        for action, mine in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            mine.append(time.perf_counter() - start)
    return [min(mine[1:]) for mine in times]


def read(files: list[pathlib.Path]) -> None:
    """Reads files into one buffer."""
    buffer = bytearray(BUFFER_BYTES)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def restore_with_orbax(blocks: list[pathlib.Path]) -> None:
    """Restores every block as NumPy arrays, one after the other, and drops it."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for block in blocks:
            checkpointer.restore(block)


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time the restoring of a checkpoint.")
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    weights = args.checkpoint.absolute() / "weights"
    files = [path for path in weights.rglob("*") if path.is_file()]
    nbytes = read_config(args.checkpoint).nbytes
    jax.devices()

    def restore() -> None:
        jax.block_until_ready(load_weights(args.checkpoint))

    def speed(seconds: float) -> float:
        return nbytes / seconds / 1e9

    times = best_seconds(args.runs, lambda: read(files), restore)
    reading, restoring = map(speed, times)
    blocks = sorted(weights.iterdir())
    (orbax,) = map(speed, best_seconds(1, lambda: restore_with_orbax(blocks)))
    share = restoring / reading

    def figure(name: str, value: float, unit: str = "GB/s", **bounds: float) -> Figure:
        return Figure(name=name, value=value, unit=unit, better="higher", **bounds)

    figures = [
        figure("restore", restoring, share_of_limit=share),
        figure("restore_read_alone", reading),
        figure("restore_orbax_itself", orbax),
        figure("restore_share_of_reading", 100 * share, "%", must=50.0),
        Figure(name="restore_size", value=nbytes / 1e9, unit="GB", better="lower"),
    ]
    for entry in figures:
        print(f"{entry.name:28} {entry.value:8.2f} {entry.unit}")
    print(record("bench/restore.py", figures))


if __name__ == "__main__":
    main()
