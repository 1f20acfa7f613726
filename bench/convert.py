"""Converting a GGUF file: throughput beside plain reading of it, peak memory, and what bounds it.

    python -m bench.convert MODEL.gguf CHECKPOINT [--keep]

A fresh process converts while its own memory (anonymous pages: what the page cache is not) is
sampled. Beside it stand the parts alone, each on one thread: reading the file, its SHA-256,
repacking its largest tensor of each format, and writing some bytes with a sync at the end. Hashing
and repacking are given for each second of processor time, so that other work on the machine does
not show. Gate: the checkpoint's contents are sound and name the file's true digest.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from bench.manifest import ROOT
from bench.summary import Figure, record
from openjet_jax.checkpoint import read_config
from openjet_jax.convert.block_formats import repack
from openjet_jax.convert.model_file import ModelFile, read_model

CHILD = """
import json, pathlib, sys, threading, time
from openjet_jax.convert.pipeline import convert_gguf

def own_bytes():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak, done = [own_bytes()], threading.Event()
start_bytes = peak[0]
def watch():
    while not done.wait(0.01):
        peak.append(max(peak.pop(), own_bytes()))
watcher = threading.Thread(target=watch)
watcher.start()
start, start_cpu = time.perf_counter(), time.process_time()
convert_gguf(sys.argv[1], sys.argv[2])
took, took_cpu = time.perf_counter() - start, time.process_time() - start_cpu
done.set()
watcher.join()
print(json.dumps({"s": took, "cpu_s": took_cpu, "bytes": peak[0] - start_bytes}))
"""
PIECE_BYTES = 16 * 2**20
WRITE_BYTES = 2 * 2**30
MAX_REPACK_BYTES = 512 * 2**20


def rate(
    nbytes: int, action: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns GB/s of one run of an action on so many bytes."""
    start = clock()
    action()
    return nbytes / (clock() - start) / 1e9


def read(path: pathlib.Path, use: Callable[[memoryview], object] = len) -> None:
    """Reads a file into one buffer, as `cat` does, and hands each piece on."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            use(buffer[:count])


def write(path: pathlib.Path, nbytes: int) -> None:
    """Writes a file of zeros, synced, and removes it."""
    with open(path, "wb", buffering=0) as file:
        for _ in range(nbytes // PIECE_BYTES):
            file.write(bytes(PIECE_BYTES))
        os.fsync(file.fileno())
    path.unlink()


def repack_rates(model: ModelFile) -> dict[str, tuple[float, float]]:
    """Returns, by type, GB/s of repacking its largest tensor and the share of the file it makes."""
    sizes: dict[str, int] = {}
    largest = {}
    for source in (s for s in model.sources if s.role.packed):
        name = source.record.type.name
        sizes[name] = sizes.get(name, 0) + source.nbytes
        if name not in largest or source.nbytes > largest[name].nbytes:
            largest[name] = source
    total = sum(sizes.values())
    rates = {}
    for name, source in largest.items():
        rows = min(source.shape[0], max(1, MAX_REPACK_BYTES // source.record.row_bytes))
        blocks, kind = source.data[:rows], source.record.type
        blocks.sum()
        rates[name] = (
            rate(blocks.nbytes, lambda b=blocks, k=kind: repack(b, k)),
            sizes[name] / total,
        )
    return rates


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time the conversion of a GGUF file.")
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    args = parser.parse_args()
    size = args.source.stat().st_size
    first_read = rate(size, lambda: read(args.source))
    again = rate(size, lambda: read(args.source))
    digest = hashlib.sha256()
    hashing = rate(size, lambda: read(args.source, digest.update), time.process_time)
    writing = rate(WRITE_BYTES, lambda: write(args.target.with_suffix(".probe"), WRITE_BYTES))
    repacking = repack_rates(read_model(args.source))
    # The harmonic mean over what the file is made of.
    repack_all = 1 / sum(share / speed for speed, share in repacking.values())
    command = [sys.executable, "-c", CHILD, str(args.source), str(args.target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    run = json.loads(done.stdout)
    config = read_config(args.target)
    if config.provenance["files"][0]["sha256"] != digest.hexdigest():
        raise SystemExit("the checkpoint names another digest: nothing is recorded")
    if not args.keep:
        shutil.rmtree(args.target)

    def speed(name: str, value: float, share: float | None = None) -> Figure:
        return Figure(name=name, value=value, unit="GB/s", better="higher", share_of_limit=share)

    converting = size / run["s"] / 1e9
    bound = min(writing * size / config.nbytes, (os.cpu_count() or 1) * size / run["cpu_s"] / 1e9)
    figures = [
        speed("convert", converting, converting / bound),
        speed("convert_by_processor_time", size / run["cpu_s"] / 1e9),
        speed("convert_read_alone_first", first_read),
        speed("convert_read_alone_cached", again),
        speed("convert_sha256_alone", hashing),
        speed("convert_write_and_sync_alone", writing),
        speed("convert_repack_alone", repack_all),
        *(speed(f"convert_repack_{name}", value) for name, (value, _) in repacking.items()),
        Figure(name="convert_size", value=size / 1e9, unit="GB", better="lower"),
        Figure(
            name="convert_peak_memory",
            value=run["bytes"] / 2**30,
            unit="GiB",
            better="lower",
            must=4.0,
        ),
    ]
    for figure in figures:
        print(f"{figure.name:32} {figure.value:8.2f} {figure.unit}")
    print(record("bench/convert.py", figures))


if __name__ == "__main__":
    main()
