"""What a cycle of sparse attention costs against history: block keys pooled, scored, blocks read.

    python -m bench.qsa [--out DIR] [--histories 512 2048 8192 32768] [--repeats 5]

One layer of the published size (24 heads of 256, 4 index heads of 128, 512 blocks) reads a window
of six tokens onto a history of index keys, with retention and padding each on and off. Gate: every
way of maintenance leaves the same bits in all block keys, and rows pooled with retention do not
exceed one for each four tokens of the window. Writes `qsa.json` and `qsa.svg`. Times are the host's
clock around a call, of the first device, beside whatever else the machine does.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench.manifest import ROOT, device_folder, manifest
from openjet_jax.attention_layers import window
from openjet_jax.config import BLOCK_POSITIONS, ROWS, DecodeConfig, Pooling, Qwen4ExpConfig
from openjet_jax.qwen4exp_weights import IndexerWeights
from openjet_jax.sparse_attention import (
    SparseCache,
    after_window,
    attend_sparse,
    index,
    selection,
    sparse_cache,
)
from openjet_jax.weights import Packed

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
      pool_us, select_us, attend_us: medians.
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


def median_us(run, *args, repeats: int) -> float:
    """Returns the median time of a compiled call."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(name: str, history: int, repeats: int, weights: IndexerWeights, keys: dict) -> Cycle:
    """Returns the cost of a window behind a committed history; `keys` holds block keys to match.

    Raises:
      SystemExit: block keys differ from those of another way of maintenance.
    """
    pooling = POOLINGS[name]
    decode = DecodeConfig(context=history + WINDOW, kv_dtype="bfloat16", pooling=pooling)
    h = jax.random.normal(jax.random.key(9), (ROWS, SIZES.hidden))
    live = jnp.arange(ROWS) < WINDOW

    def pool(kv, start, rows):
        at = window(start, jnp.arange(ROWS) < rows)
        return after_window(index(h, 0, kv, weights, at, SIZES), at)

    def choose(kv, start):
        return selection(h, 0, kv, weights, window(start, live), SIZES)

    def attend(kv, start):
        q = jax.random.normal(jax.random.key(4), (ROWS, SIZES.heads, SIZES.head_width))
        out, _ = attend_sparse(q, h, (0, 0), kv, weights, window(start, live), SIZES)
        return out

    start = jnp.int32(history)
    pool, choose, attend = jax.jit(pool), jax.jit(choose), jax.jit(attend)
    committed = pool(filled(decode), start, jnp.int32(0)).committed(start)
    after = pool(committed, start, jnp.int32(WINDOW))
    complete, retained = (history + WINDOW) // BLOCK_POSITIONS, int(committed.retained)
    rows = complete - retained
    if pooling.retention and rows > -(-WINDOW // BLOCK_POSITIONS):
        raise SystemExit(f"{name}: {rows} rows were pooled for a window of {WINDOW}")
    found = np.asarray(after.pooled)[:, :complete].view(np.uint32)
    if not np.array_equal(keys.setdefault(history, found), found):
        raise SystemExit(f"{name}: block keys differ from those of another way")
    row_bytes, list_rows = SIZES.index_width * after.raw.dtype.itemsize, after.list_rows
    select_us = median_us(choose, after, start, repeats=repeats)
    lanes = (min(SIZES.budget, complete) + 1) * BLOCK_POSITIONS
    lane_bytes = 2 * SIZES.kv_heads * SIZES.head_width * after.k.dtype.itemsize
    return Cycle(
        pooling=name,
        history=history,
        rows_pooled=rows,
        rows_padded=-(-rows // list_rows) * list_rows,
        blocks_scored=complete,
        bytes_pooled=LAYERS * rows * BLOCK_POSITIONS * row_bytes,
        bytes_scored=LAYERS * complete * SIZES.index_width * 4,
        bytes_attended=LAYERS * WINDOW * lanes * lane_bytes,
        pool_us=median_us(pool, committed, start, jnp.int32(WINDOW), repeats=repeats),
        select_us=select_us,
        attend_us=max(median_us(attend, after, start, repeats=repeats) - select_us, 0.0),
    )


def plot(cycles: list[Cycle], path: pathlib.Path) -> None:
    """Draws the time to maintain block keys against history, both logarithmic, as SVG."""
    width, height, left, bottom = 640, 400, 70, 340
    times = [cycle.pool_us for cycle in cycles]
    histories = sorted({cycle.history for cycle in cycles})
    low, high = np.log10(min(times)) - 0.1, np.log10(max(times)) + 0.1
    near, far = np.log2(histories[0]) - 0.2, np.log2(histories[-1]) + 0.2

    def place(history: float, us: float) -> tuple[float, float]:
        x = left + (np.log2(history) - near) / (far - near) * 540
        return float(x), float(bottom - (np.log10(us) - low) / (high - low) * 300)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="14">Pooling block keys of one layer, a window of'
        f" {WINDOW} tokens</text>",
    ]
    for history in histories:
        x, _ = place(history, times[0])
        parts.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{history}</text>')
    parts.append(f'<text x="340" y="{bottom + 40}" text-anchor="middle">history, tokens</text>')
    for power in range(int(np.ceil(low)), int(np.floor(high)) + 1):
        _, y = place(histories[0], 10.0**power)
        parts.append(f'<line x1="{left}" x2="610" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power} us</text>')
    for i, (name, color) in enumerate(zip(POOLINGS, COLORS, strict=True)):
        line = [place(c.history, c.pool_us) for c in cycles if c.pooling == name]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 10}" y="{48 + 16 * i}" fill="{color}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def main() -> None:
    """Measures, checks, writes and prints."""
    parser = argparse.ArgumentParser(description="Time sparse attention against history.")
    parser.add_argument("--out", type=pathlib.Path, default=None)
    parser.add_argument("--histories", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    out = args.out or ROOT / "bench" / "results" / device_folder()
    out.mkdir(parents=True, exist_ok=True)
    weights, keys = make_weights(), {}
    run = functools.partial(measure, repeats=args.repeats, weights=weights, keys=keys)
    cycles = [run(name, history) for history in args.histories for name in POOLINGS]
    for c in cycles:
        print(
            f"{c.history:6} {c.pooling:22} rows {c.rows_pooled:5} pool {c.pool_us:9.0f} us"
            f" select {c.select_us:8.0f} us attend {c.attend_us:8.0f} us"
        )
    report = {"manifest": manifest(), "cycles": [dataclasses.asdict(c) for c in cycles]}
    (out / "qsa.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(cycles, out / "qsa.svg")


if __name__ == "__main__":
    main()
