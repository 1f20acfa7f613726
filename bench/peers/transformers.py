"""Hugging Face transformers beside us: its `qwen3_5` model in a file's sizes, in bfloat16.

    python -m bench.peers.transformers MODEL.gguf [--contexts 64] [--tokens 64] [--compiled]

Only sizes are read of the file: weights are random and made on the device, and the text means
nothing. One sequence, greedy, without drafts; no token is fetched before the last. `--compiled`
takes a static cache and what torch.compile makes of the model, CUDA graphs included, which is
faster and takes minutes to compile. Needs, in any environment of its own,

    pip install torch transformers flash-linear-attention

of which the last, and `causal-conv1d`, are optional: kernels of the DeltaNet layers. What was there
is recorded. A file of sizes as `sizes_of` gives them, in JSON, may stand in for the model's.
"""

import argparse
import importlib
import importlib.metadata
import inspect
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from bench.intervals import median

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
)
CHUNK, PROMPT, WARM_TOKENS = 2048, 2048, 8
"""Tokens read at once, length of the prompt whose reading is timed, tokens before decoding is."""


def sizes_of(config: Any, tied: bool) -> dict[str, Any]:
    """Returns sizes as transformers names them, and how many parameters they make; JSON-ready.

    Args:
      config: the model's, a `Qwen35Config`; the MTP block is left out.
      tied: whether the head is the embedding.

    Raises:
      ValueError: a model of another architecture.
    """
    if config.architecture != "qwen35":
        raise ValueError(f"{config.architecture=}: transformers is a peer for qwen35 alone")
    c, hidden = config, config.hidden
    pairs, values = c.rotary // 2, c.value_heads * c.gdn_width
    rope = {
        "rope_type": "default",
        "rope_theta": c.rope_theta,
        "partial_rotary_factor": c.rotary / c.head_width,
        "mrope_section": [(pairs + 2 - axis) // 3 for axis in range(3)],
    }
    settings = {
        "vocab_size": c.vocab,
        "hidden_size": hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.eps,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "linear_conv_kernel_dim": c.conv_taps,
        "linear_key_head_dim": c.gdn_width,
        "linear_value_head_dim": c.gdn_width,
        "linear_num_key_heads": c.key_heads,
        "linear_num_value_heads": c.value_heads,
        "layer_types": ["linear_attention" if r else "full_attention" for r in c.recurrent],
    }
    both = 2 * hidden + 3 * hidden * c.ffn
    # Queries with their gates, keys and values, output, norms of queries and keys.
    attention = hidden * c.head_width * (3 * c.heads + 2 * c.kv_heads) + 2 * c.head_width
    # Queries, keys, values and gate, two numbers a head, output; convolution, decay, norm.
    deltanet = hidden * (c.conv_channels + 2 * values + 2 * c.value_heads)
    deltanet += c.conv_channels * c.conv_taps + 2 * c.value_heads + c.gdn_width
    layers = sum(both + (deltanet if r else attention) for r in c.recurrent)
    parameters = layers + hidden + c.vocab * hidden * (1 if tied else 2)
    return {"settings": settings, "parameters": parameters}


def sizes_in(path: pathlib.Path) -> dict[str, Any]:
    """Returns the sizes in a .gguf file, or in a .json file of `sizes_of`."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    from openjet_jax.convert.gguf import open_gguf
    from openjet_jax.convert.metadata import read_config

    file = open_gguf(path)
    return sizes_of(read_config(file), tied="output.weight" not in file.tensors)


class Peer:
    """A model of transformers with random weights.

    Attributes:
      model: the module.
      device: where it is.
      compiled: whether it decodes compiled, with a static cache.
    """

    def __init__(self, sizes: dict[str, Any], device: str | None = None, compiled: bool = False):
        """Makes the weights.

        Args:
          sizes: from `sizes_of`.
          device: as PyTorch names it; by default the GPU where there is one.
          compiled: whether to decode compiled.

        Raises:
          RuntimeError: a package is missing or too old, or makes a model of another size.
        """
        try:
            torch: Any = importlib.import_module("torch")
            transformers: Any = importlib.import_module("transformers")
            theirs: Any = importlib.import_module("transformers.models.qwen3_5")
        except ImportError as error:
            raise RuntimeError(f"{error}: pip install --upgrade torch transformers") from error
        self._torch, self._caches, self.compiled = torch, transformers, compiled
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        config = theirs.Qwen3_5TextConfig(**sizes["settings"])
        torch.manual_seed(0)
        with torch.device(self.device):
            make = theirs.Qwen3_5ForCausalLM._from_config
            self.model = make(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        found = sum(weight.numel() for weight in self.model.parameters())
        if found != sizes["parameters"]:
            raise RuntimeError(f"transformers makes {found} parameters, not {sizes['parameters']}")
        self._step = self.model
        if compiled:
            # What `generate` does with a static cache.
            self._step = torch.compile(self.model, mode="reduce-overhead", fullgraph=True)

    def read(self, count: int, room: int) -> tuple[Any, Any, float]:
        """Returns the cache of a prompt of random tokens, the next token, and the seconds taken.

        Args:
          count: tokens of the prompt.
          room: tokens that follow it.
        """
        torch, config = self._torch, self.model.config
        seeded = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, count), generator=seeded).to(self.device)
        if self.compiled:
            cache = self._caches.StaticCache(config=config, max_cache_len=count + room)
        else:
            cache = self._caches.DynamicCache(config=config)
        start, logits = self._now(), None
        for at in range(0, count, CHUNK):
            logits = self._logits(self.model, ids[:, at : at + CHUNK], at, cache)
        return cache, self._best(logits), self._now() - start

    def decode(self, context: int, tokens: int) -> tuple[float, list[int]]:
        """Returns tokens a second behind a prompt, and all tokens.

        Raises:
          RuntimeError: logits are not finite.
        """
        cache, token, _ = self.read(context, WARM_TOKENS + tokens + 1)
        found, start, logits = [token], 0.0, None
        for step in range(WARM_TOKENS + tokens):
            if step == WARM_TOKENS:
                start = self._now()
            logits = self._logits(self._step, token, context + step, cache)
            found.append(token := self._best(logits))
        seconds = self._now() - start
        if logits is None or not bool(self._torch.isfinite(logits).all()):
            raise RuntimeError("the peer's logits are not finite")
        return tokens / seconds, self._torch.cat(found, 1)[0].tolist()

    def facts(self) -> dict[str, Any]:
        """Returns what is recorded of it."""
        versions = {}
        for name in PACKAGES:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = None
        cuda = self.device == "cuda"
        return {
            "versions": versions,
            "cuda": self._torch.version.cuda,
            "device": self._torch.cuda.get_device_name() if cuda else self.device,
            "dtype": "bfloat16",
            "compiled": self.compiled,
        }

    def _logits(self, model: Any, ids: Any, at: int, cache: Any) -> Any:
        """Returns the logits after the last of some ids, the first of which stands at `at`."""
        torch = self._torch
        positions = torch.arange(at, at + ids.shape[1], device=self.device)[None]
        # Compiled steps write into the same memory each time.
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            settings = {"position_ids": positions, "use_cache": True, "logits_to_keep": 1}
            return model(ids, **{self._cache_name(): cache}, **settings).logits[:, -1]

    def _best(self, logits: Any) -> Any:
        return logits.argmax(-1, keepdim=True).clone()

    def _cache_name(self) -> str:
        """Returns what the model calls its cache; it was renamed."""
        known = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in known else "past_key_values"

    def _now(self) -> float:
        if self.device == "cuda":
            self._torch.cuda.synchronize()
        return time.perf_counter()


def measure(
    peer: Peer, contexts: Sequence[int], tokens: int, runs: int, prompt: int = PROMPT
) -> dict[str, Any]:
    """Returns rates in tokens a second, JSON-ready: of decoding by context, and of reading.

    Args:
      peer: the model.
      contexts: tokens before those decoded.
      tokens: decoded in each run.
      runs: of each, after one that is not counted.
      prompt: tokens whose reading is timed.
    """
    rows = []
    for context in contexts:
        found = [peer.decode(context, tokens) for _ in range(runs + 1)][1:]
        same = all(ids == found[0][1] for _, ids in found)
        rate = median([rate for rate, _ in found])
        rows.append({"context": context, "depth": 0, "rate": rate, "same_tokens": same})
    seconds = [peer.read(prompt, 0)[2] for _ in range(runs + 1)][1:]
    reading = {"tokens": prompt, "rate": median([prompt / s for s in seconds])}
    return {"rows": rows, "prefill": reading, **peer.facts()}


def measured_by(
    python: str,
    sizes: dict[str, Any],
    contexts: Sequence[int],
    tokens: int,
    runs: int,
    compiled: bool = False,
) -> dict[str, Any]:
    """Returns what `measure` does in a process of another interpreter.

    Args:
      python: the interpreter, whose environment has PyTorch and transformers.
      sizes: from `sizes_of`.
      contexts: tokens before those decoded, as in `measure`.
      tokens: decoded in each run.
      runs: of each.
      compiled: of `Peer`.

    Raises:
      RuntimeError: there is no such program, or it fails; its last words are shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "sizes.json"
        path.write_text(json.dumps(sizes))
        command = [python, "-m", "bench.peers.transformers", str(path), *["--compiled"] * compiled]
        command += ["--contexts", *map(str, contexts), "--tokens", str(tokens), "--runs", str(runs)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"{python}: {error.strerror}; give an interpreter") from None
    if done.returncode:
        raise RuntimeError(f"{python}: ...{done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Prints what was measured, on the last line all of it as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time transformers on the sizes of a file.")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--contexts", "--context", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="static cache and torch.compile")
    args = parser.parse_args()
    try:
        peer = Peer(sizes_in(args.model), compiled=args.compiled)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    found = measure(peer, args.contexts, args.tokens, args.runs, args.prompt)
    for row in found["rows"]:
        print(f"{row['rate']['value']:.1f} tok/s behind {row['context']} tokens")
    print(f"prefill {found['prefill']['rate']['value']:.0f} tok/s of {args.prompt} tokens")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
