"""`openjet-jax evaluate`: what it takes, and what it does with it."""

import argparse
import json
import sys
from pathlib import Path

from openjet_jax.arguments import add_model, ids_of, model_of, text_of


def add_evaluation(sub: argparse.ArgumentParser) -> None:
    """Adds the model, the text, and what it is compared with."""
    add_model(sub)
    text = sub.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, help="UTF-8 text to read")
    text.add_argument("--tokens", type=Path, help=".npy file of token ids to read")
    sub.add_argument("--windows", type=int, help="most windows of --context tokens (512) to read")
    sub.add_argument("--backend", default="auto", help="auto, reference or mosaic")
    sub.add_argument("--chunk", type=int, help="tokens read at once; 1: one by one")
    what = "a file of llama-perplexity --kl-divergence-base; its own text is read by default"
    sub.add_argument("--base-logits", type=Path, help=what)
    sub.add_argument("--base", help="another model to compare with, or the same one read otherwise")
    sub.add_argument("--base-backend", help="backend of the base; --backend by default")
    sub.add_argument("--base-kv-dtype", help="cache format of the base; --kv-dtype by default")
    sub.add_argument("--base-chunk", type=int, help="--chunk of the base")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def run_evaluation(args: argparse.Namespace) -> None:
    """Evaluates, and prints what was found.

    Raises:
      ValueError: options contradict one another, or as `evaluate`.
    """
    from openjet_jax.evaluation import WINDOW, evaluate, reader, render
    from openjet_jax.llama_logits import open_logits
    from openjet_jax.loading import load
    from openjet_jax.tiling import resolve_backend

    others = (args.base, args.base_backend, args.base_kv_dtype, args.base_chunk)
    against_model = any(option is not None for option in others)
    if args.base_logits is not None and against_model:
        raise ValueError("--base-logits is a base already; leave the other --base options out")
    base = None if args.base_logits is None else open_logits(args.base_logits)
    if base is None and args.text is None and args.tokens is None:
        raise ValueError("there is nothing to read: give --text, --tokens or --base-logits")
    args.context = args.context or (WINDOW if base is None else base.window)
    model = model_of(args, "full")
    if args.text is not None:
        ids = model.tokenizer.encode(text_of(args.text))
    elif args.tokens is not None:
        ids = ids_of(args.tokens)
    else:
        assert base is not None
        ids = base.tokens.reshape(-1)
    ours = reader(model, args.context, args.kv_dtype, args.chunk)
    if against_model:
        backend = args.base_backend or args.backend
        same = args.base is None and resolve_backend(backend) == model.backend
        other = model if same else load(args.base or args.model, backend=backend)
        kv_dtype, chunk = args.base_kv_dtype or args.kv_dtype, args.base_chunk or args.chunk
        base = reader(other, args.context, kv_dtype, chunk)

    def progress(done: int, total: int) -> None:
        end = "\n" if done == total else "\r"
        print(f"openjet-jax: window {done} of {total}", file=sys.stderr, end=end, flush=True)

    found = evaluate(ours, ids, base, windows=args.windows, progress=progress)
    print(json.dumps(found) if args.json else render(found))
