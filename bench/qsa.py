"""What a cycle of sparse attention costs against history: block keys pooled, scored, blocks read.

    python -m bench.qsa [--histories 512 1024 2048 4096 8192 16384 32768] [--repeats 5]

One layer of the published size (24 heads of 256, 4 index heads of 128, 512 blocks) reads a window
of six tokens onto a history of index keys, with retention and padding each on and off. Gate: every
way of maintenance leaves the same bits in all block keys, and rows pooled with retention do not
exceed one for each four tokens of the window. Besides the JSON, `qsa.svg` shows all of it against
history. Times are the host's clock around a call, the cache donated, medians.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.panels import Line, Panel, draw
from bench.summary import Figure, record
from openjet_jax.attention_layers import Window, window
from openjet_jax.config import BLOCK_POSITIONS, ROWS, DecodeConfig, Pooling, Qwen4ExpConfig
from openjet_jax.qwen4exp_weights import IndexerWeights
from openjet_jax.sparse_attention import (
    SparseCache,
    after_window,
    index,
    selection,
    sparse_cache,
)
from openjet_jax.weights import Packed
from pallas_kernels.sparse_attention import sparse_attention_reference

WINDOW = 6
"""Tokens of a cycle that drafts five."""

LAYERS = 12
"""Sparse layers of the published model; bytes are given for all of them."""

SIZES = Qwen4ExpConfig(
    num_layers=2,
    hidden=2560,
    vocab=248320,
    vocab_used=248320,
    heads=24,
    kv_heads=2,
    head_width=256,
    rotary=64,
    rope_theta=1e7,
    key_heads=16,
    value_heads=48,
    gdn_width=128,
    conv_taps=4,
    eps=1e-6,
    recurrent=(True, False),
    has_mtp=False,
    context=262144,
    streams=4,
    stream_rank=320,
    experts=512,
    experts_used=10,
    expert_ffn=640,
    shared_ffn=640,
    sparse=(False, True),
    mtp_sparse=False,
    index_heads=4,
    index_width=128,
    budget=512,
    ngram_layer=0,
    ngram=3,
    ngram_heads=8,
    ngram_taps=4,
    ngram_end=248044,
    ngram_multipliers=(23703573157769, 20109073645365, 8052911324071),
    ngram_sizes=(20000003,) * 16,
    ngram_offsets=tuple(20000003 * i for i in range(16)),
    ngram_rows=320000048,
)

POOLINGS = {
    "retained, padded to 8": Pooling(),
    "retained, exact": Pooling(padding=0),
    "rebuilt, by 8": Pooling(retention=False),
    "rebuilt, one by one": Pooling(retention=False, padding=0),
}
COLORS = ("#1f6f43", "#63a37f", "#a33c2c", "#d98c7e")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycle:
    """What one window costs at one history, for one layer where not said otherwise.

    Attributes:
      pooling: how block keys are maintained.
      history: positions before the window.
      rows_pooled: block keys that had to be pooled, and `rows_padded`, rows computed for them.
      blocks_scored: by the window.
      bytes_pooled, bytes_scored, bytes_attended: read in all `LAYERS` layers.
      pool_us: median; select_us, attend_us: medians, measured once for each history.
    """

    pooling: str
    history: int
    rows_pooled: int
    rows_padded: int
    blocks_scored: int
    bytes_pooled: int
    bytes_scored: int
    bytes_attended: int
    pool_us: float
    select_us: float
    attend_us: float


def make_weights() -> IndexerWeights:
    """Returns random index projections."""

    def packed(seed: int, rows: int) -> Packed:
        values = jax.random.normal(jax.random.key(seed), (1, rows, SIZES.hidden)) / 50
        shape = (rows, SIZES.hidden)
        return Packed(stacks=({"values": values},), formats=("f32",), table=((0, 0),), shape=shape)

    gain = jnp.ones((1, SIZES.index_width))
    heads = SIZES.index_heads * SIZES.index_width
    return IndexerWeights(
        q=packed(1, heads), k=packed(2, SIZES.index_width), q_norm=gain, k_norm=gain
    )


def filled(decode: DecodeConfig) -> SparseCache:
    """Returns a cache of random contents whose block keys are not pooled yet."""
    kv = sparse_cache(SIZES, decode, 1, 1)
    assert isinstance(kv, SparseCache)
    leaves, tree = jax.tree.flatten(kv.planes())
    filled = [
        jax.random.normal(jax.random.key(i), leaf.shape, jnp.float32).astype(leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return dataclasses.replace(kv, **jax.tree.unflatten(tree, filled))


def median_us(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of a call, after one that warms up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


class Kept:
    """A cache that every call consumes and replaces, rolled back to the history before each."""

    def __init__(self, step: Callable[..., SparseCache], kv: SparseCache, history: int):
        """Reads the history, so that its block keys are valid where they are retained."""
        self._step, self._start = jax.jit(step, donate_argnums=0), jnp.int32(history)
        self.kv = self._step(kv, self._start, jnp.int32(0))

    def __call__(self) -> SparseCache:
        """Returns the cache after a window."""
        self.kv = self._step(self.kv, self._start, jnp.int32(WINDOW))
        return self.kv


def measure_rest(
    h: jax.Array, kv: SparseCache, weights: IndexerWeights, at: Window, repeats: int
) -> tuple[float, float]:
    """Returns the times to score and choose blocks, and to attend, whoever pooled the keys."""
    q = jax.random.normal(jax.random.key(4), (ROWS, SIZES.heads, SIZES.head_width))

    @jax.jit
    def choose(kv):
        return selection(h, 0, kv, weights, at, SIZES)

    @jax.jit
    def attend(kv, blocks, counted):
        return sparse_attention_reference(q, kv.k, kv.v, 0, blocks, counted, at.positions)

    chosen = choose(kv)
    return (
        median_us(lambda: choose(kv), repeats),
        median_us(lambda: attend(kv, *chosen), repeats),
    )


def measure(
    name: str, history: int, repeats: int, weights: IndexerWeights, keys: dict, others: dict
) -> Cycle:
    """Returns the cost of a window behind a committed history.

    Args:
      name: of the way of maintenance.
      history: positions before the window.
      repeats: calls that medians are of.
      weights: the indexer.
      keys: block keys of other ways, by history, to match.
      others: times of `measure_rest`, by history.

    Raises:
      SystemExit: block keys differ from those of another way of maintenance.
    """
    pooling = POOLINGS[name]
    decode = DecodeConfig(context=history + WINDOW, kv_dtype="bfloat16", pooling=pooling)
    h = jax.random.normal(jax.random.key(9), (ROWS, SIZES.hidden))
    start = jnp.int32(history)
    at = window(start, jnp.arange(ROWS) < WINDOW)

    def pool(kv, start, rows):
        at = window(start, jnp.arange(ROWS) < rows)
        return after_window(index(h, 0, kv.committed(start), weights, at, SIZES), at)

    kept = Kept(pool, filled(decode), history)
    retained = int(kept.kv.committed(start).retained)
    complete = (history + WINDOW) // BLOCK_POSITIONS
    rows = complete - retained
    if pooling.retention and rows > -(-WINDOW // BLOCK_POSITIONS):
        raise SystemExit(f"{name}: {rows} rows were pooled for a window of {WINDOW}")
    pool_us = median_us(kept, repeats)
    kv = kept.kv
    found = np.asarray(kv.pooled)[:, :complete].view(np.uint32)
    if not np.array_equal(keys.setdefault(history, found), found):
        raise SystemExit(f"{name}: block keys differ from those of another way")
    if history not in others:
        others[history] = measure_rest(h, kv, weights, at, repeats)
    select_us, attend_us = others[history]
    row_bytes, list_rows = SIZES.index_width * kv.raw.dtype.itemsize, kv.list_rows
    lanes = (min(SIZES.budget, complete) + 1) * BLOCK_POSITIONS
    lane_bytes = 2 * SIZES.kv_heads * SIZES.head_width * kv.k.dtype.itemsize
    return Cycle(
        pooling=name,
        history=history,
        rows_pooled=rows,
        rows_padded=-(-rows // list_rows) * list_rows,
        blocks_scored=complete,
        bytes_pooled=LAYERS * rows * BLOCK_POSITIONS * row_bytes,
        bytes_scored=LAYERS * complete * SIZES.index_width * 4,
        bytes_attended=LAYERS * WINDOW * lanes * lane_bytes,
        pool_us=pool_us,
        select_us=select_us,
        attend_us=attend_us,
    )


def plot(cycles: list[Cycle], path: pathlib.Path) -> None:
    """Draws rows, bytes, blocks and times against history."""

    def lines(field: str) -> list[Line]:
        return [
            Line(name, color, [(c.history, getattr(c, field)) for c in cycles if c.pooling == name])
            for (name, color) in zip(POOLINGS, COLORS, strict=True)
        ]

    def line(name: str, color: str, field: str) -> Line:
        default = next(iter(POOLINGS))
        points = [(c.history, getattr(c, field)) for c in cycles if c.pooling == default]
        return Line(name, color, points)

    read = [
        line("scored", "#1f3f6f", "bytes_scored"),
        line("attended", "#7a5c9e", "bytes_attended"),
    ]
    took = [
        line("scored and chosen", "#1f3f6f", "select_us"),
        line("attended", "#7a5c9e", "attend_us"),
    ]
    panels = [
        Panel("block keys pooled in a layer", "", lines("rows_pooled")),
        Panel(f"bytes read by pooling, {LAYERS} layers", " B", lines("bytes_pooled")),
        Panel("time to pool, one layer", " us", lines("pool_us")),
        Panel("blocks scored in a layer", "", [line("all ways", "#1f3f6f", "blocks_scored")]),
        Panel(f"other bytes read, {LAYERS} layers", " B", read),
        Panel("other time, one layer", " us", took),
    ]
    title = f"Sparse attention, a window of {WINDOW} tokens, against history in tokens"
    draw(path, title, panels, columns=3)


def main() -> None:
    """Measures, checks, writes and prints."""
    parser = argparse.ArgumentParser(description="Time sparse attention against history.")
    parser.add_argument("--histories", type=int, nargs="+", default=[512 << i for i in range(7)])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    weights, keys, others = make_weights(), {}, {}
    run = functools.partial(
        measure, repeats=args.repeats, weights=weights, keys=keys, others=others
    )
    cycles = []
    for history, name in itertools.product(args.histories, POOLINGS):
        cycles.append(c := run(name, history))
        print(
            f"{c.history:6} {c.pooling:22} rows {c.rows_pooled:5} pool {c.pool_us:9.0f} us"
            f" select {c.select_us:8.0f} us attend {c.attend_us:8.0f} us"
        )
    figures = [
        Figure(
            name=f"qsa_{part}_{c.history}_{'kept' if POOLINGS[c.pooling].retention else 'rebuilt'}",
            value=getattr(c, f"{part}_us"),
            unit="us",
            better="lower",
        )
        for c in cycles
        if POOLINGS[c.pooling].padding and c.history in (args.histories[0], args.histories[-1])
        for part in ("pool", "select", "attend")
    ]
    details = {"cycles": [dataclasses.asdict(c) for c in cycles]}
    summary = record("bench/qsa.py", figures, details=details)
    plot(cycles, summary.with_name("qsa.svg"))
    print(summary)


if __name__ == "__main__":
    main()
