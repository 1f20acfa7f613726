"""How far the distributions of two engines are apart, over a text that both read.

The text is cut into windows, each read from an empty state, and only the second half of a window
counts, as in llama-perplexity: every token is predicted from some context. At each such position

    KL(base || model) = sum over tokens of p_base (log p_base - log p_model)

top-1 agreement is whether both like the same token best, and perplexity is exp of the mean negative
log-probability of the text's next token. Sums are float64 on the host. Logits of a few positions
are alive at a time, however long the text and large the vocabulary.

Intervals are of 95 % and by batch means (Law and Kelton): positions near each other are alike, so
the text is cut into 30 runs of positions, and their means are taken for independent.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from openjet_jax.compiled import Programs
from openjet_jax.dispatches import checked_ids
from openjet_jax.engine import programs_for
from openjet_jax.llama_logits import LEAST_LOG_PROBABILITY, LlamaLogits
from openjet_jax.loading import Model
from openjet_jax.scoring import ROWS_AT_ONCE, logits_of, read_hidden

WINDOW = 512
"""Tokens of a window by default, llama-perplexity's own."""

BATCHES = 30
STUDENT_T = 2.045
"""Of 29 degrees of freedom: 95 % of the distribution are within this many standard errors."""

POSITION_GROUPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """A model in the shapes in which it reads windows.

    Attributes:
      model: the model.
      programs: its programs.
      chunk: most tokens that are read at once; None for what the programs take.
    """

    model: Model
    programs: Programs
    chunk: int | None = None

    def rows(self, ids: Int[np.ndarray, " window"], first: int) -> Iterator[np.ndarray]:
        """Yields log-probabilities [rows, vocab] of positions `first` on, the last excluded."""
        borders = range(0, len(ids), self.chunk or len(ids))
        hidden = read_hidden(self.model, self.programs, ids, borders)
        for at in range(first, len(ids) - 1, ROWS_AT_ONCE):
            rows = hidden[at : min(at + ROWS_AT_ONCE, len(ids) - 1)]
            yield log_softmax(logits_of(self.model, self.programs, rows))

    def facts(self) -> dict[str, Any]:
        """Returns what it is, for the report."""
        decode = self.programs.decode
        return {
            "model": self.model.directory.name,
            "hash": self.model.hash,
            "backend": self.model.backend,
            "kv_dtype": decode.kv_dtype,
            "chunk": self.chunk or decode.chunks[-1],
        }


def reader(
    model: Model, window: int, kv_dtype: str | None = None, chunk: int | None = None
) -> Reader:
    """Returns a reader of windows.

    Args:
      model: from `load`.
      window: tokens of a window.
      kv_dtype: format of the key-value cache; by default as in generation.
      chunk: most tokens that are read at once: 1 reads one by one; by default as in generation.

    Raises:
      ValueError: a window longer than the model's context, an unknown format, or no chunk.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=} must be at least 1")
    return Reader(model=model, programs=programs_for(model, window, kv_dtype), chunk=chunk)


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """What was found at each position that counts, in order; `kl`, `same` and `base` are of a base.

    Attributes:
      position: inside its window.
      nll, base_nll: negative log-probability of the next token.
      kl: divergence of the model from the base.
      same: whether both like the same token best.
      mass: the base's probability that the divergence was summed over.
    """

    position: list[np.ndarray] = dataclasses.field(default_factory=list)
    nll: list[np.ndarray] = dataclasses.field(default_factory=list)
    base_nll: list[np.ndarray] = dataclasses.field(default_factory=list)
    kl: list[np.ndarray] = dataclasses.field(default_factory=list)
    same: list[np.ndarray] = dataclasses.field(default_factory=list)
    mass: list[np.ndarray] = dataclasses.field(default_factory=list)

    def take(
        self,
        start: int,
        ours: Float[np.ndarray, "rows vocab"],
        base: Float[np.ndarray, "rows vocab"] | None,
        following: Int[np.ndarray, " rows"],
        least: float,
    ) -> None:
        """Takes in the log-probabilities of some positions; base tokens at `least` do not count."""
        row = np.arange(len(ours))
        self.position.append(start + row)
        self.nll.append(-ours[row, following])
        if base is None:
            return
        counts = base > least
        p = np.where(counts, np.exp(base, dtype=np.float64), 0.0)
        self.base_nll.append(-base[row, following].astype(np.float64))
        self.kl.append((p * np.where(counts, base - ours, 0.0)).sum(-1))
        self.same.append(ours.argmax(-1) == base.argmax(-1))
        self.mass.append(p.sum(-1))


def evaluate(
    reader: Reader,
    ids: Int[np.ndarray, " tokens"],
    base: Reader | LlamaLogits | None = None,
    *,
    windows: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Returns how the model does on a text, and how far it is from a base, JSON-ready.

    Args:
      reader: the model.
      ids: the text; what does not fill a window is left over.
      base: another reader, or a file of llama.cpp of the same text.
      windows: most windows to read.
      progress: is told the windows done and all there are.

    Raises:
      ValueError: there is no whole window; a file is of another vocabulary, window or text; or
        logits are not finite.
    """
    window, vocab = reader.programs.decode.context, reader.model.config.vocab
    known = checked_ids(ids, vocab)
    if window < 3:
        raise ValueError(f"{window=} must be at least 3: the second half counts, but for its last")
    if windows is not None and windows < 1:
        raise ValueError(f"{windows=} must be at least 1")
    if isinstance(base, Reader):
        _check_base(base, window, vocab)
    elif base is not None:
        _check_file(base, known, window, vocab)
    total = min(len(known) // window, len(known) if windows is None else windows)
    if total < 1:
        raise ValueError(
            f"the text has {len(known)} tokens, less than one window of {window}; give a longer "
            "text, or a smaller --context"
        )
    found, first = Comparison(), window // 2
    least = LEAST_LOG_PROBABILITY if isinstance(base, LlamaLogits) else -np.inf
    for index in range(total):
        text, at = known[index * window : (index + 1) * window], first
        others = base.rows(text, first) if isinstance(base, Reader) else None
        for ours in reader.rows(text, first):
            stop = at + len(ours)
            theirs = base.rows(index, at, stop) if isinstance(base, LlamaLogits) else None
            theirs = next(others) if others is not None else theirs
            found.take(at, ours, theirs, text[at + 1 : stop + 1], least)
            at = stop
        progress(index + 1, total)
    facts = {"model": reader.facts(), "window": window, "windows": total, "first": first}
    return facts | _base_facts(base, total) | _figures(found, base is not None, window)


def log_softmax(logits: Float[np.ndarray, "rows vocab"]) -> Float[np.ndarray, "rows vocab"]:
    """Returns log-probabilities, float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def estimate(values: Float[np.ndarray, " n"]) -> dict[str, float | None]:
    """Returns a mean with its interval of 95 %, which is None for fewer than 30 values."""
    mean = float(values.mean())
    if len(values) < BATCHES:
        return {"value": mean, "low": None, "high": None}
    means = np.array([batch.mean() for batch in np.array_split(values, BATCHES)])
    half = STUDENT_T * float(means.std(ddof=1)) / BATCHES**0.5
    return {"value": mean, "low": mean - half, "high": mean + half}


def _check_base(base: Reader, window: int, vocab: int) -> None:
    if base.programs.decode.context != window or base.model.config.vocab != vocab:
        raise ValueError(
            f"the base has {base.model.config.vocab} tokens and windows of "
            f"{base.programs.decode.context}, the model {vocab} and {window}: they cannot be "
            "compared position by position"
        )


def _check_file(base: LlamaLogits, known: np.ndarray, window: int, vocab: int) -> None:
    """Raises ValueError unless a file is of this vocabulary, window and text."""
    if base.vocab != vocab:
        raise ValueError(
            f"{base.path} is of a vocabulary of {base.vocab} tokens, the model has {vocab}: it was "
            "made with another model"
        )
    if base.window != window:
        raise ValueError(
            f"{base.path} has windows of {base.window} tokens, not {window}; leave --context out"
        )
    theirs = base.tokens.reshape(-1)
    count = min(len(theirs), len(known))
    differing = np.flatnonzero(theirs[:count] != known[:count])
    if differing.size or len(known) < len(theirs):
        at = int(differing[0]) if differing.size else count
        ours = known[at] if at < len(known) else "the end"
        raise ValueError(
            f"{base.path} is of another text or tokenizer: token {at} is {theirs[at]} there and "
            f"{ours} here; leave the text out to evaluate the file's own tokens"
        )


def _base_facts(base: Reader | LlamaLogits | None, windows: int) -> dict[str, Any]:
    if base is None:
        return {}
    if isinstance(base, Reader):
        return {"base": base.facts()}
    resolution = float(np.mean([base.resolution(index) for index in range(windows)]))
    return {"base": {"file": str(base.path), "resolution": resolution}}


def _figures(found: Comparison, compared: bool, window: int) -> dict[str, Any]:
    """Returns all figures, over every position and by groups of positions in the window."""
    columns = {
        field.name: np.concatenate(values)
        for field in dataclasses.fields(found)
        if (values := getattr(found, field.name))
    }
    position = columns["position"]
    edges = np.linspace(window // 2, window - 1, POSITION_GROUPS + 1).astype(int)
    groups = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        inside = (position >= start) & (position < stop)
        if inside.any():
            part = {name: values[inside] for name, values in columns.items()}
            groups.append({"start": int(start), "stop": int(stop), **_means(part, compared)})
    whole = _means(columns, compared)
    if compared:
        quantiles = np.quantile(columns["kl"], [0.5, 0.99, 1.0]).tolist()
        whole["kl_quantiles"] = dict(zip(("0.5", "0.99", "1"), quantiles, strict=True))
        whole["base_mass"] = float(columns["mass"].mean())
    return {**whole, "by_position": groups}


def _means(columns: dict[str, np.ndarray], compared: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "positions": len(columns["nll"]),
        "perplexity": _exp(estimate(columns["nll"])),
    }
    if compared:
        found["base_perplexity"] = _exp(estimate(columns["base_nll"]))
        found["perplexity_ratio"] = _exp(estimate(columns["nll"] - columns["base_nll"]))
        found["kl"] = estimate(columns["kl"])
        found["top1"] = estimate(columns["same"].astype(np.float64))
    return found


def _exp(of_logs: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if x is None else float(np.exp(x)) for name, x in of_logs.items()}


def render(found: dict[str, Any]) -> str:
    """Returns the figures of `evaluate` as lines for people."""
    names = {
        "perplexity": "perplexity",
        "base_perplexity": "perplexity of the base",
        "perplexity_ratio": "ratio of the two",
        "kl": "mean KL divergence",
        "top1": "top-1 agreement",
    }
    lines = [f"{found['positions']:,} positions in {found['windows']} windows of {found['window']}"]
    lines += [f"{names[key]:24}{_interval(found[key])}" for key in names if key in found]
    if "kl" in found:
        quantiles = found["kl_quantiles"]
        lines.append(
            f"{'KL: median, 99 %, worst':24}" + ", ".join(f"{x:.3g}" for x in quantiles.values())
        )
    lines.append("")
    columns = [key for key in ("perplexity", "kl", "top1") if key in found]
    lines.append("".join(f"{name:26}" for name in ("positions", *columns)).rstrip())
    for group in found["by_position"]:
        cells = [f"{group['start']}..{group['stop'] - 1}", *(_interval(group[c]) for c in columns)]
        lines.append("".join(f"{cell:26}" for cell in cells).rstrip())
    return "\n".join(lines)


def _interval(found: dict[str, float | None]) -> str:
    if found["low"] is None:
        return f"{found['value']:.5g}"
    return f"{found['value']:.5g} ({found['low']:.5g} to {found['high']:.5g})"
