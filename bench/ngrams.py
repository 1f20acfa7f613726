"""Three ways to look up the n-grams of drafted tokens, whose ids only the device knows.

    python -m bench.ngrams [--gib 2] [--repeats 200]

The table is a mapped file of packed rows. The ways:

    mapped     the program hashes and gathers; on a CPU its table is the map itself
    callback   the program asks the host for the packed rows (`jax.pure_callback`)
    split      one program drafts, the host hashes and gathers, another program verifies

A cycle's six tokens name 96 rows of 90 bytes (4 bits, 160 wide), at random. Gate: all three give
the same numbers. Times are medians of the host's clock from dispatch to the result, drafting and
verifying standing in as one sum each; *warm* with the table in the page cache, *cold* with its
pages dropped before every cycle, with and without pages around them being read ahead. Also noted:
whether a compiled program can be stored.
"""

import argparse
import mmap
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from bench.summary import Figure, record
from openjet_jax.checkpoint import TensorEntry
from openjet_jax.convert.ngram_keys import derived_multipliers, derived_sizes
from openjet_jax.row_tables import ROWS as TABLE_PLANE
from openjet_jax.row_tables import map_rows, read_here_and_there, rows_path, write_rows
from openjet_jax.weights import RowTable
from pallas_kernels.formats import FORMATS
from pallas_kernels.ngram_hash import ngram_rows

VOCAB, END, ROWS, WIDTH, HASHES, NGRAM = 248320, 248044, 6, 160, 16, 3
FORMAT, BLOCK = "iq4_nl", "table"
MULTIPLIERS = derived_multipliers(VOCAB, NGRAM)
SLAB_BYTES = 2**26


def row_bytes() -> int:
    """Returns the bytes of a packed row."""
    specs = FORMATS[FORMAT].plane_specs(1, WIDTH).values()
    return sum(int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize for spec in specs)


def slabs(rows: int) -> Iterator[np.ndarray]:
    """Yields random packed rows whose scales are small fp16 numbers."""
    specs, random = FORMATS[FORMAT].plane_specs(1, WIDTH), np.random.default_rng(0)
    step = SLAB_BYTES // row_bytes()
    for start in range(0, rows, step):
        planes, count = [], min(step, rows - start)
        for spec in specs.values():
            dtype, shape = np.dtype(spec.dtype), (count, spec.shape[1])
            if dtype == np.uint8:
                plane = random.integers(0, 256, shape, np.uint8)
            else:
                plane = random.uniform(0.01, 0.1, shape).astype(np.float16).view(dtype)
            planes.append(plane.view(np.uint8).reshape(count, -1))
        yield np.concatenate(planes, 1)


def host_rows(ids: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Returns the table's rows of each token's n-grams, as `ngram_rows` does, by the host."""
    past, tokens, cut = NGRAM - 1, ids.astype(np.uint64), np.zeros(len(ids) - NGRAM + 1, bool)
    mixed, found = tokens[past:] * np.uint64(MULTIPLIERS[0]), []
    for back in range(1, NGRAM):
        before = tokens[past - back : len(ids) - back]
        cut = cut | (before == END)
        mixed = mixed ^ (np.where(cut, np.uint64(END), before) * np.uint64(MULTIPLIERS[back]))
        found.append(mixed)
    heads = HASHES // len(found)
    keys = np.repeat(np.stack(found, 1), heads, 1)
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return (keys % np.asarray(sizes, np.uint64)).astype(np.int64) + offsets


def median_us(run: Callable[[np.ndarray], jax.Array], repeats: int, before=lambda: None) -> float:
    """Returns the median time of a cycle on fresh ids."""
    random, times = np.random.default_rng(1), []
    for i in range(repeats + 3):
        ids = random.integers(0, VOCAB, ROWS + NGRAM - 1).astype(np.int32)
        before()
        start = time.perf_counter()
        run(ids).block_until_ready()
        if i >= 3:
            times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time look-ups of drafted n-grams.")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the table")
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    total = int(args.gib * 2**30) // row_bytes()
    sizes = derived_sizes(total // HASHES - 2000, HASHES)
    offsets = tuple(sum(sizes[:i]) for i in range(HASHES))
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        entry = TensorEntry(
            name=BLOCK,
            source_type=FORMAT,
            field=BLOCK,
            slot=0,
            block=BLOCK,
            format=FORMAT,
            shape=(total, WIDTH),
            planes={TABLE_PLANE: write_rows(directory, BLOCK, slabs(total))},
        )
        print(f"{total:,} rows of {row_bytes()} bytes")
        measure(directory, entry, sizes, offsets, args.repeats)


def measure(directory: pathlib.Path, entry: TensorEntry, sizes, offsets, repeats: int) -> None:
    """Times the three ways and records them."""
    mapped, mapping = map_rows(directory, entry)
    table = RowTable(rows=jax.device_put(mapped, may_alias=True), format=FORMAT, width=WIDTH)

    def draft(ids):  # the ids come out of arithmetic on the device
        return ids + jnp.int32(0) * jnp.sum(ids)

    def verify(embedded):
        return jnp.sum(embedded.reshape(ROWS, HASHES * WIDTH), 1)

    def unpacked(packed):
        return RowTable(rows=packed, format=FORMAT, width=WIDTH).take(jnp.arange(len(packed)))

    def gather(ids):
        return mapped[host_rows(np.asarray(ids), sizes).reshape(-1)]

    def in_program(table, ids):
        rows = ngram_rows(
            draft(ids), multipliers=MULTIPLIERS, sizes=sizes, offsets=offsets, end=END
        )
        return verify(table.take(rows.reshape(-1)))

    def by_callback(ids):
        spec = jax.ShapeDtypeStruct((ROWS * HASHES, mapped.shape[1]), jnp.uint8)
        return verify(unpacked(jax.pure_callback(gather, spec, draft(ids))))

    ids = jnp.zeros(ROWS + NGRAM - 1, jnp.int32)
    mapped_run = jax.jit(in_program).lower(table, ids).compile()
    callback_run = jax.jit(by_callback).lower(ids).compile()
    drafting = jax.jit(draft).lower(ids).compile()
    verifying = jax.jit(lambda packed: verify(unpacked(packed)))
    verifying = verifying.lower(jnp.asarray(gather(np.zeros(ROWS + NGRAM - 1)))).compile()
    ways = {
        "mapped": lambda ids: mapped_run(table, jnp.asarray(ids)),
        "callback": lambda ids: callback_run(jnp.asarray(ids)),
        "split": lambda ids: verifying(jnp.asarray(gather(drafting(jnp.asarray(ids))))),
    }
    sample = np.asarray([7, END, 9, 1, 2, END, END, 3], np.int32)
    expected = np.asarray(ways["split"](sample))
    for name, run in ways.items():
        if not np.array_equal(np.asarray(run(sample)), expected):
            raise SystemExit(f"{name} gives other numbers: nothing is recorded")

    handle = os.open(rows_path(directory, BLOCK), os.O_RDONLY)

    def drop() -> None:
        mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    few, figures = max(repeats // 10, 5), []

    def note(name: str, value: float) -> None:
        print(f"{name:28} {value:8.0f} us")
        figures.append(Figure(name=f"ngrams_{name}", value=value, unit="us", better="lower"))

    note("mapped_cold_reading_ahead", median_us(ways["mapped"], few, drop))
    read_here_and_there(mapping)
    for name, run in ways.items():
        note(f"{name}_cold", median_us(run, few, drop))
    while os.read(handle, SLAB_BYTES):
        pass
    for name, run in ways.items():
        note(f"{name}_warm", median_us(run, repeats))
    os.close(handle)
    stored = {}
    for name, program in (("mapped", mapped_run), ("callback", callback_run)):
        try:
            serialize_executable.serialize(program)
            stored[name] = True
        except Exception as error:  # whatever JAX raises, the program cannot be stored
            stored[name] = f"{type(error).__name__}: {error}"[:200]
    print("stored:", stored)
    details = {"table_bytes": int(mapped.nbytes), "can_be_stored": stored}
    print(record("bench/ngrams.py", figures, details=details))


if __name__ == "__main__":
    main()
