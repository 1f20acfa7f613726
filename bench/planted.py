"""Weights with a known text and known drafts, so that cycles with acceptance can be timed.

The trunk follows every token by the next id of a circle, and the MTP block knows this for a share
of the tokens. Every token has a code of random signs, in two parts. The embedding of t holds the
code of t, but its second part is that of another token where t is *unknown*; the head's row of the
token after t holds the code of t. The first part is three times as long, so the trunk, whose
layers add no more than the embedding did, is always right; the MTP block passes the second part on
and nothing else, so it is wrong exactly where t is unknown. Unknown tokens are drawn at random: at
a rate r a draft behind k right ones is right with probability r, and depth d gives
1 + r + ... + r^d tokens a cycle.

All other weights, the sizes and the formats are those of `synthetic_tensors`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int8, UInt8

from bench.synthetic_blocks import signed_blocks
from bench.synthetic_tensors import Tensor
from bench.synthetic_tokenizer import ADDED, vocab_parts
from openjet_jax.config import Qwen35Config

MOST_TOKENS = 32_000
"""Length of the circle: its tokens are in the default draft vocabulary."""

FIRST_PART = 0.75
MTP_GAIN = 0.1
"""What the MTP block's layers add, in place of as much as they read."""

ROWS_AT_ONCE = 4096
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Planted:
    """What is planted in a file.

    Attributes:
      config: the model's sizes.
      known: for each token of the circle, whether the MTP block knows what follows.
      codes: the signs of each token of the circle, eight to a byte.
    """

    config: Qwen35Config
    known: Bool[np.ndarray, " circle"]
    codes: UInt8[np.ndarray, "circle bytes"]

    @property
    def circle(self) -> int:
        """Tokens that follow one another; any other id counts as its remainder."""
        return len(self.known)

    def following(self, token: int) -> int:
        """Returns the token that the trunk puts after another."""
        return (token % self.circle + 1) % self.circle

    def fitting(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the spread that it has here."""
        block = f"blk.{self.config.num_layers}."
        if tensor.name in (f"{block}attn_output.weight", f"{block}ffn_down.weight"):
            return dataclasses.replace(tensor, spread=MTP_GAIN * tensor.spread)
        return tensor

    def data(self, tensor: Tensor) -> Iterator[np.ndarray] | None:
        """Returns the data of a tensor that is planted, piece by piece; None for others."""
        makers = {
            EMBEDDING: self._embedding,
            HEAD: self._head,
            f"blk.{self.config.num_layers}.nextn.eh_proj.weight": self._join,
        }
        if tensor.name not in makers:
            return None
        make, size = makers[tensor.name], tensor.spread
        if make == self._join:
            size = 1.0
        starts = range(0, tensor.shape[0], ROWS_AT_ONCE)
        rows = (np.arange(at, min(at + ROWS_AT_ONCE, tensor.shape[0])) for at in starts)
        return (signed_blocks(tensor.form, make(part), size) for part in rows)

    def _signs(self, tokens: np.ndarray) -> Int8[np.ndarray, "tokens hidden"]:
        bits = np.unpackbits(self.codes[tokens], axis=1, count=self.config.hidden)
        return 2 * bits.view(np.int8) - 1

    def _embedding(self, rows: np.ndarray) -> Int8[np.ndarray, "rows hidden"]:
        tokens = rows % self.circle
        other = np.where(self.known[tokens], tokens, (tokens + self.circle // 2) % self.circle)
        cut = _cut(self.config.hidden)
        return np.concatenate([self._signs(tokens)[:, :cut], self._signs(other)[:, cut:]], axis=1)

    def _head(self, rows: np.ndarray) -> Int8[np.ndarray, "rows hidden"]:
        # Rows outside the circle are the opposite of one inside, and never best.
        sign = np.where(rows < self.circle, 1, -1).astype(np.int8)
        return sign[:, None] * self._signs((rows - 1) % self.circle)

    def _join(self, rows: np.ndarray) -> Int8[np.ndarray, "rows both"]:
        values = np.zeros((len(rows), 2 * self.config.hidden), np.int8)
        passed = rows >= _cut(self.config.hidden)
        values[np.flatnonzero(passed), rows[passed]] = 1
        return values


def planted(config: Qwen35Config, tied: bool, rate: float, seed: int) -> Planted:
    """Returns what is planted for a rate.

    Args:
      config: the model's sizes.
      tied: whether the head is the embedding.
      rate: the share of tokens that the MTP block knows.
      seed: the same arguments give the same weights.

    Raises:
      ValueError: the rate is not in 0..1, or the model has a tied head or no MTP block.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"{rate=} must be in 0..1")
    if tied or not config.has_mtp:
        raise ValueError(
            "planted text needs an MTP block and a head of its own: use the sizes 9B or 27B"
        )
    normal = config.vocab_used - len(ADDED) - vocab_parts(config.vocab)[1]
    circle = min(MOST_TOKENS, normal)
    rng = np.random.Generator(np.random.SFC64([seed, 0x706C]))
    known = np.zeros(circle, bool)
    known[rng.permutation(circle)[: round(rate * circle)]] = True
    codes = rng.integers(0, 256, (circle, -(-config.hidden // 8)), np.uint8)
    return Planted(config=config, known=known, codes=codes)


def _cut(hidden: int) -> int:
    """Returns where the second part of a code begins."""
    return round(FIRST_PART * hidden)
