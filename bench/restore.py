"""Restoring a checkpoint, beside reading the same bytes from the page cache and beside orbax.

    python -m bench.restore CHECKPOINT [--runs 5]

Reading alone is plain `read` of every weight file into one buffer, over and over, on one thread: no
memory is touched that was not touched before. Restoring ends with weights on the device, every byte
checked. Both after a run that fills the page cache; the best of the runs counts, as other work on
the machine only slows them. Gate: restoring verifies the checksum of every plane.
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


def best_seconds(runs: int, action: Callable[[], object]) -> float:
    """Returns the shortest time of some runs, after one that does not count."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times[1:])


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

    reading = speed(best_seconds(args.runs, lambda: read(files)))
    restoring = speed(best_seconds(args.runs, restore))
    orbax = speed(best_seconds(2, lambda: restore_with_orbax(sorted(weights.iterdir()))))
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
