"""Attention on a card: right first, then a cycle's share of the read bandwidth, a chunk's rate.

`python -m bench.attention [--out DIR] [--only NAME ...]` measures the 27B model's 16 layers with 5
rows at each history, and one layer with a prompt's chunk of 2,048, files the figures, and compares
with the reference compiled by XLA; a chunk also with PyTorch's attention where there is one. Keys
and values of 16 layers are more than the cache holds. Times are CUPTI's, with command buffers off:
`XLA_FLAGS=--xla_gpu_enable_command_buffer=`.
"""

import argparse
import dataclasses
import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import read_bandwidth
from bench.summary import RESULTS, Figure, record
from bench.timing import kernel_times_us, wall_time_us
from pallas_kernels import ptx
from pallas_kernels.attention import BLOCK, attention_reference
from pallas_kernels.attention_chunks import ROWS
from pallas_kernels.attention_decode import attn_decode
from pallas_kernels.attention_panels import WIDTH
from pallas_kernels.attention_prefill import attn_prefill
from pallas_kernels.cached_rows import Q8_0, empty, like

LAYERS, HEADS, KV_HEADS, LIVE = 16, 24, 4, 5
LIMITS = {"bfloat16": 2e-3, Q8_0: 2.5e-3}
"""Largest relative RMS errors against float32 over the same keys and values: values in q8_0 are
rounded to bfloat16 once more on their way to the tensor cores."""

_TORCH_CALLS = 5

_PEAK = 989e12
"""Dense 16-bit operations a second of an H200, by its data sheet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A history.

    Attributes:
      name: of its figure.
      length: positions, those of the rows included.
      must, aim: percent of the read bandwidth, or microseconds a layer where `in_us`; None for a
        case without bounds.
      in_us: whether the figure is a time.
      kind: format of the cache.
      kv_heads: of the cache, each read by as many query heads as the model's.
    """

    name: str
    length: int
    must: float | None = None
    aim: float | None = None
    in_us: bool = False
    kind: str = "bfloat16"
    kv_heads: int = KV_HEADS


CASES = [
    Case(name="attn_decode_1k", length=1024, must=12, aim=6, in_us=True),
    Case(name="attn_decode_32k_bf16", length=32768, must=55, aim=80),
    Case(name="attn_decode_32k_q8", length=32768, must=50, aim=75, kind=Q8_0),
]

ONE_HEAD = [
    Case(name="attn_decode_128k_bf16_one_head", length=131072, kv_heads=1),
    Case(name="attn_decode_128k_q8_one_head", length=131072, kind=Q8_0, kv_heads=1),
]
"""As many bytes as at 32K, a row behind the other; measured where they are named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkCase:
    """A chunk of a prompt.

    Attributes:
      name: of its figure.
      history: positions before it.
      must, aim: TFLOP/s; None for a case without bounds.
      kind: format of the cache.
      rows: of the chunk.
    """

    name: str
    history: int
    must: float | None = None
    aim: float | None = None
    kind: str = "bfloat16"
    rows: int = 2048


CHUNK_CASES = [
    ChunkCase(name="attn_prefill_32k", history=32768, must=300, aim=500),
    ChunkCase(name="attn_prefill_32k_q8", history=32768, kind=Q8_0),
    ChunkCase(name="attn_prefill_first", history=0),
    ChunkCase(name="attn_prefill_32k_512", history=32768, rows=512),
]


def operands(length: int, layers: int, kind: str, heads: int = HEADS, kv_heads: int = KV_HEADS):
    """Returns queries, keys, values, gates, positions and the end of a cycle after a history."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = layers, -(-(length + ROWS) // BLOCK) * BLOCK, kv_heads, WIDTH
    cache, row = empty((1, WIDTH), kind), jnp.arange(ROWS)
    return (
        jax.random.normal(keys[0], (ROWS, heads, WIDTH)),
        like(cache, jax.random.normal(keys[1], shape)),
        like(cache, jax.random.normal(keys[2], shape)),
        jax.random.normal(keys[3], (ROWS, heads, WIDTH)),
        jnp.where(row < LIVE, length - LIVE + row, -1),
        jnp.int32(length),
    )


def chunk_operands(
    history: int, rows: int, layers: int, kind: str, heads: int = HEADS, kv_heads: int = KV_HEADS
):
    """Returns queries, keys, values, gates, start and end of a chunk after a history."""
    q_key, k_key, v_key, gate_key = jax.random.split(jax.random.key(0), 4)
    end = history + rows
    shape = layers, -(-end // BLOCK) * BLOCK, kv_heads, WIDTH
    cache = empty((1, WIDTH), kind)
    return (
        jax.random.normal(q_key, (rows, heads, WIDTH)),
        like(cache, jax.random.normal(k_key, shape)),
        like(cache, jax.random.normal(v_key, shape)),
        jax.random.normal(gate_key, (rows, heads, WIDTH)),
        jnp.int32(history),
        jnp.int32(end),
    )


def _reference(q, k, v, layer, positions, end, gate):
    return attention_reference(q, k[layer], v[layer], positions, end) * jax.nn.sigmoid(gate)


def _all_layers(run):
    @jax.jit
    def layers(q, k, v, gate, positions, end):
        num_layers, *_ = k.shape

        def body(layer, total):
            # The next layer's queries follow from this one's output, as in a model.
            out = run(q + 1e-6 * total, k, v, layer, positions, end, gate)
            return total + out

        return jax.lax.fori_loop(0, num_layers, body, jnp.zeros_like(q))

    return layers


def measure(case: Case, bandwidth: float) -> dict:
    """Returns errors against the reference, and times of all layers."""
    heads = HEADS // KV_HEADS * case.kv_heads
    sizes = case.length, LAYERS, case.kind, heads, case.kv_heads
    q, k, v, gate, positions, end = operands(*sizes)
    layer = jnp.int32(LAYERS - 1)
    at = layer, positions, end, gate
    out = np.asarray(attn_decode(q, k, v, *at), np.float64)
    want = np.asarray(jax.jit(_reference)(q, k, v, *at), np.float64)
    error = float(np.sqrt(np.mean((out - want) ** 2) / np.mean(want**2)))
    layers, arguments = _all_layers(attn_decode), (q, k, v, gate, positions, end)
    times = kernel_times_us(layers, *arguments, name="attn_decode", per_call=LAYERS)
    merges = kernel_times_us(layers, *arguments, name="attn_decode_merge", per_call=LAYERS)
    peer = kernel_times_us(_all_layers(_reference), *arguments, name="", per_call=LAYERS)
    us, num_bytes = float(np.median(times)), _read_bytes(k, v, case.length)
    return dict(
        name=case.name,
        error=error,
        right=error < LIMITS[case.kind],
        us=us,
        merge_us=float(np.median(merges)),
        gb_s=num_bytes / us / 1e3,
        share=num_bytes / us / 1e3 / bandwidth,
        spread_us=float(np.percentile(times, 90) - np.percentile(times, 10)),
        loop_us=wall_time_us(layers, *arguments, repeats=3, calls=5) / LAYERS,
        reference_us=float(np.median(peer)),
        reference_share=num_bytes / float(np.median(peer)) / 1e3 / bandwidth,
    )


def _read_bytes(k, v, length: int) -> int:
    """Returns what a layer reads of the cache."""
    position = sum(x.nbytes // (x.shape[0] * x.shape[1]) for x in jax.tree.leaves((k, v)))
    return length * position


def measure_chunk(case: ChunkCase) -> dict:
    """Returns errors against the reference, whether rows stand alone, and rates of one layer."""
    q, k, v, gate, start, end = chunk_operands(case.history, case.rows, 1, case.kind)
    at = jnp.int32(0), start, end
    got = attn_prefill(q, k, v, *at, gate)
    positions = start + jnp.arange(case.rows)
    reference = jax.jit(_reference)
    want = reference(q, k, v, at[0], positions, end, gate)
    off, true = np.asarray(got - want, np.float64), np.asarray(want, np.float64)
    error = float(np.sqrt(np.mean(off**2) / np.mean(true**2)))
    other = attn_prefill(q.at[1:].multiply(-3), k, v, *at, gate)
    repeats = bool(jnp.array_equal(got, attn_prefill(q, k, v, *at, gate)))
    alone = bool(jnp.array_equal(got[0], other[0]))
    us = float(np.median(kernel_times_us(attn_prefill, q, k, v, *at, gate, name="attn_prefill")))
    arguments = q, k, v, at[0], positions, end, gate
    slow = kernel_times_us(reference, *arguments, name="", per_call=1, repeats=2)
    seen = case.rows * case.history + case.rows * (case.rows + 1) // 2
    operations = 4 * seen * HEADS * WIDTH
    torch_us = _torch_us(q, k) if case.kind == "bfloat16" else None
    return dict(
        name=case.name,
        error=error,
        repeatable=repeats,
        row_invariant=alone,
        right=error < LIMITS[case.kind] and repeats and alone,
        us=us,
        tflop_s=operations / us / 1e6,
        share=operations / us * 1e6 / _PEAK,
        reference_tflop_s=operations / float(np.median(slow)) / 1e6,
        torch_tflop_s=None if torch_us is None else operations / torch_us / 1e6,
    )


def _torch_us(q, k) -> float | None:
    """Returns microseconds of PyTorch's attention, without the gates; None where it cannot run."""
    try:
        torch = importlib.import_module("torch")
        bias = importlib.import_module("torch.nn.attention.bias")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    rows, heads, width = q.shape
    _, length, kv_heads, _ = k.shape

    def random(heads, length):
        return torch.randn(1, heads, length, width, device="cuda", dtype=torch.bfloat16)

    queries, keys, held = random(heads, rows), random(kv_heads, length), random(kv_heads, length)
    mask = bias.causal_lower_right(rows, length)

    def run():
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(queries, keys, held, attn_mask=mask, enable_gqa=True)

    try:
        run()
    except (RuntimeError, TypeError) as error:
        print(f"no peer: {error}", flush=True)
        return None
    begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_TORCH_CALLS):
        run()
    done.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(done) / _TORCH_CALLS


def chunk_figure(case: ChunkCase, row: dict) -> Figure:
    """Returns the figure of a measured chunk; its peer is PyTorch's attention, or the reference."""
    peer = row["torch_tflop_s"]
    return Figure(
        name=case.name,
        value=row["tflop_s"],
        unit="TFLOP/s",
        better="higher",
        must=case.must,
        aim=case.aim,
        share_of_limit=row["share"],
        peer=row["reference_tflop_s"] if peer is None else peer,
    )


def figure(case: Case, row: dict) -> Figure:
    """Returns the figure of a measured case."""
    return Figure(
        name=case.name,
        value=row["us"] if case.in_us else 100 * row["share"],
        unit="us a layer" if case.in_us else "% of read bandwidth",
        better="lower" if case.in_us else "higher",
        must=case.must,
        aim=case.aim,
        share_of_limit=row["share"],
        peer=row["reference_us"] if case.in_us else 100 * row["reference_share"],
    )


def main() -> None:
    """Measures the cases and files the figures of those that are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    ptx.starts_early = False
    bandwidth = read_bandwidth()
    rows, figures = [], []
    asked = [case for case in [*CASES, *ONE_HEAD, *CHUNK_CASES] if case.name in arguments.only]
    for case in asked or [*CASES, *CHUNK_CASES]:
        chunk = isinstance(case, ChunkCase)
        rows.append(measure_chunk(case) if chunk else measure(case, bandwidth))
        print(json.dumps(rows[-1]), flush=True)
        if rows[-1]["right"]:
            figures.append(chunk_figure(case, rows[-1]) if chunk else figure(case, rows[-1]))
        details = dict(cases=rows, read_gb_s=bandwidth)
        record("bench/attention.py", figures, arguments.out, details)
    wrong = [row["name"] for row in rows if not row["right"]]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
