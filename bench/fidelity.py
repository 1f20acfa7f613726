"""How near a model's probabilities stay to exact ones, by format of the cache, and to llama.cpp's.

    python -m bench.fidelity [MODEL] [--kv-dtypes float32 bfloat16 q8_0] [--base-logits FILE]

The base is the reference path with a float32 cache, reading tokens one by one; what is compared
reads as generation does, on the backend that `load` takes: on an sm_90 GPU that is kernels. A text
is the project's own source in windows. FILE is of `llama-perplexity --kl-divergence-base` and holds
its own text. Divergences are in nats, means over positions; 95 % intervals are in the details.
"""

import argparse
import pathlib
from typing import Any

import numpy as np

import openjet_jax as oj
from bench.decode import name_of, prompt_of
from bench.summary import RESULTS, Figure, record
from openjet_jax.evaluation import evaluate, reader
from openjet_jax.llama_logits import open_logits

KL_MUST, TOP1_MUST = 1e-3, 98.0
"""Mean divergence from the base, at most; percent of positions that like the same token best."""


def measure(model: oj.Model, base: oj.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row for each comparison, JSON-ready.

    Args:
      model: what is compared.
      base: the same on the reference path.
      args: of the command line.
    """
    ids = np.asarray(prompt_of(model, args.window * args.windows), np.int32)
    exact = reader(base, args.window, "float32", 1)
    rows = []

    def compare(name: str, ours: Any, text: np.ndarray, against: Any) -> None:
        found = evaluate(ours, text, against)
        rows.append({"name": name, **found})
        print(f"{name:20} KL {found['kl']['value']:.3g}, top-1 {found['top1']['value']:.4%}")

    for kv_dtype in args.kv_dtypes:
        compare(kv_dtype, reader(model, args.window, kv_dtype), ids, exact)
    if args.base_logits:
        file = open_logits(args.base_logits)
        text = file.tokens.reshape(-1)
        for kv_dtype in args.kv_dtypes:
            compare(f"llama_{kv_dtype}", reader(model, file.window, kv_dtype), text, file)
    return rows


def figures(rows: list[dict[str, Any]], name: str) -> list[Figure]:
    """Returns divergence and agreement of each row; bounds are for those against the base."""
    found = []
    for row in rows:
        bounded = not row["name"].startswith("llama")
        found.append(
            Figure(
                name=f"{name}_kl_{row['name']}",
                value=row["kl"]["value"],
                unit="nats",
                better="lower",
                must=KL_MUST if bounded else None,
            )
        )
        found.append(
            Figure(
                name=f"{name}_top1_{row['name']}",
                value=100 * row["top1"]["value"],
                unit="%",
                better="higher",
                must=TOP1_MUST if bounded else None,
            )
        )
    return found


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description="Compare probabilities with exact ones.")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--kv-dtypes", nargs="+", default=["float32", "bfloat16", "q8_0"])
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--base-logits", type=pathlib.Path, help="a file of llama-perplexity")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="where to record")
    args = parser.parse_args()
    model = oj.load(args.model)
    rows = measure(model, oj.load(args.model, backend="reference"), args)
    name = name_of(model, args.model) or pathlib.Path(args.model).stem
    details = {"model": args.model, "rows": rows}
    print(record("bench/fidelity.py", figures(rows, name), args.results, details))


if __name__ == "__main__":
    main()
