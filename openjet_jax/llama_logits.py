"""Logits that `llama-perplexity --kl-divergence-base FILE` wrote, read where they lie.

    8 bytes   "_logits_"
    int32     tokens of a window, n; tokens of the vocabulary, V; windows, w
    int32     token ids [w, n]
    uint16    [w, n - 1 - n // 2, 4 + V rounded up to even]

A row belongs to a position of the second half of its window, the last excluded, and predicts the
token after it. Its first four words are two float32, a scale and the least log-probability; word i
of the rest says that token i has `scale * word + least`. Logits more than 16 below the best were
raised to that: what is at the floor is left out of sums, as llama.cpp does itself. Little-endian
throughout (tools/perplexity/perplexity.cpp of llama.cpp).
"""

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

MAGIC = b"_logits_"
HEADER_BYTES = len(MAGIC) + 12
LEAST_LOG_PROBABILITY = -16.0
"""Tokens at or below it do not count: the file does not tell how unlikely they are."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LlamaLogits:
    """A file, mapped.

    Attributes:
      path: where it is.
      vocab: tokens that have a log-probability.
      tokens: the text, window by window.
      words: its rows, undecoded.
    """

    path: Path
    vocab: int
    tokens: Int[np.ndarray, "windows window"]
    words: np.ndarray

    @property
    def window(self) -> int:
        """Tokens of a window, which was read from an empty state."""
        return self.tokens.shape[1]

    def rows(self, window: int, start: int, stop: int) -> Float[np.ndarray, "rows vocab"]:
        """Returns the log-probabilities at positions `start` to `stop - 1` of a window, float32.

        Raises:
          ValueError: a scale is not finite.
        """
        first = self.window // 2
        words = np.asarray(self.words[window, start - first : stop - first])
        scale, least = np.ascontiguousarray(words[:, :4]).view("<f4").T
        if not (np.isfinite(scale).all() and np.isfinite(least).all() and (scale >= 0).all()):
            raise ValueError(
                f"{self.path}: window {window} has scales that are no numbers: the file is damaged"
            )
        return scale[:, None] * words[:, 4 : 4 + self.vocab].astype(np.float32) + least[:, None]

    def resolution(self, window: int) -> float:
        """Returns the mean step between log-probabilities in a window."""
        return float(np.ascontiguousarray(self.words[window, :, :2]).view("<f4").mean())


def open_logits(path: Path) -> LlamaLogits:
    """Returns a file's logits.

    Raises:
      ValueError: it is another kind of file, contradicts itself, or was cut off.
      OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
        size = file.seek(0, 2)
    if len(header) < HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{path} is not a file of logits; write one with llama-perplexity --kl-divergence-base"
        )
    window, vocab, windows = (int(n) for n in np.frombuffer(header, "<i4", offset=len(MAGIC)))
    if window < 4 or vocab < 1 or windows < 1:
        raise ValueError(f"{path} is damaged: {windows} windows of {window} tokens of {vocab}")
    row_words, num_rows = 2 * ((vocab + 1) // 2) + 4, window - 1 - window // 2
    start = HEADER_BYTES + 4 * windows * window
    window_bytes = 2 * num_rows * row_words
    if size != start + windows * window_bytes:
        whole = max(0, (size - start) // window_bytes)
        raise ValueError(
            f"{path} has {size:,} bytes where {start + windows * window_bytes:,} were to be "
            f"written: it holds {min(whole, windows)} of {windows} windows; let llama-perplexity "
            "run to its end, or give it fewer --chunks"
        )
    tokens = np.memmap(path, "<i4", "r", HEADER_BYTES, (windows, window))
    words = np.memmap(path, "<u2", "r", start, (windows, num_rows, row_words))
    return LlamaLogits(path=path, vocab=vocab, tokens=tokens, words=words)
