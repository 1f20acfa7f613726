"""What is fixed before anything runs: the model's sizes and the shapes decoding is compiled for.

Both classes are frozen, hashable and validated on construction. They know no arrays, no files.
"""

import dataclasses
import functools
import math

ROWS = 8
"""Rows of a cycle: the newest token and up to five drafts, padded to one shape for every depth."""

MAX_DEPTH = 5
"""Most drafts a cycle verifies."""

MAX_STOP_IDS = 16
"""Most token ids at which the device stops by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a qwen35 model (Gated DeltaNet and gated attention, one MTP block).

    Attributes:
      num_layers: trunk layers, without the MTP block.
      hidden: width D of the residual stream.
      ffn: width F of the feed-forward block.
      vocab: rows of the embedding and of the head, padding rows included.
      vocab_used: ids at and above this are padding and are never emitted.
      heads, kv_heads, head_width: full attention. Query head h reads KV head h // (heads/kv_heads).
      rotary: leading dimensions of a head that rotate (half-split pairs).
      rope_theta: base of the rotary frequencies.
      key_heads, value_heads, gdn_width: Gated DeltaNet. Value head p reads key head p % key_heads.
      conv_taps: length of the causal depthwise convolution.
      eps: epsilon of every RMS norm and of the q/k L2 norm.
      recurrent: for each trunk layer, whether it is Gated DeltaNet (else full attention).
      has_mtp: whether the MTP block is there, so that drafts can be made.
      context: positions the model was trained for.
    """

    num_layers: int
    hidden: int
    ffn: int
    vocab: int
    vocab_used: int
    heads: int
    kv_heads: int
    head_width: int
    rotary: int
    rope_theta: float
    key_heads: int
    value_heads: int
    gdn_width: int
    conv_taps: int
    eps: float
    recurrent: tuple[bool, ...]
    has_mtp: bool
    context: int

    def __post_init__(self):
        """Checks every field against the others; raises ValueError naming the first that is off."""
        positive = "num_layers hidden ffn vocab heads kv_heads head_width"
        for name in f"{positive} key_heads value_heads gdn_width context".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if len(self.recurrent) != self.num_layers:
            raise ValueError(f"{len(self.recurrent)=} must equal {self.num_layers=}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads=} must be a multiple of {self.kv_heads=}")
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads=} must be a multiple of {self.key_heads=}")
        if self.rotary % 2 or not 0 < self.rotary <= self.head_width:
            raise ValueError(f"{self.rotary=} must be even and at most {self.head_width=}")
        if self.conv_taps < 2:
            raise ValueError(f"{self.conv_taps=} must be at least 2")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"{self.eps=} must be a positive number")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ValueError(f"{self.rope_theta=} must be a positive number")
        if not 0 < self.vocab_used <= self.vocab:
            raise ValueError(f"{self.vocab_used=} must be in 1..{self.vocab}")

    @property
    def conv_channels(self) -> int:
        """Channels of the DeltaNet convolution: queries, keys and values of all heads."""
        return (2 * self.key_heads + self.value_heads) * self.gdn_width

    @property
    def history(self) -> int:
        """Rows of the past that the convolution reads."""
        return self.conv_taps - 1

    @functools.cached_property
    def gdn_layers(self) -> tuple[int, ...]:
        """Trunk indices of the Gated DeltaNet layers."""
        return tuple(i for i, r in enumerate(self.recurrent) if r)

    @functools.cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Trunk indices of the full-attention layers."""
        return tuple(i for i, r in enumerate(self.recurrent) if not r)


KV_DTYPES = ("float32", "bfloat16")
"""Formats of the key-value cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Shapes that programs are compiled for.

    Attributes:
      context: most positions a conversation can hold, prompt and output together.
      kv_dtype: format of the key-value cache, one of `KV_DTYPES`.
      chunks: sizes, in rows, of the prefill programs; a prompt is cut into the largest first.
      cycles_per_dispatch: most cycles the device runs before the host looks.
    """

    context: int = 4096
    kv_dtype: str = "float32"
    chunks: tuple[int, ...] = (64, 512)
    cycles_per_dispatch: int = 4

    def __post_init__(self):
        """Raises ValueError naming the field, the limit and the way out."""
        if self.context < 1:
            raise ValueError(f"context={self.context} must be at least 1")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} is not supported; use one of {', '.join(KV_DTYPES)}"
            )
        if (
            not self.chunks
            or any(c < 1 for c in self.chunks)
            or sorted(set(self.chunks)) != list(self.chunks)
        ):
            raise ValueError(f"chunks={self.chunks} must be increasing positive sizes")
        if self.cycles_per_dispatch < 1:
            raise ValueError(f"cycles_per_dispatch={self.cycles_per_dispatch} must be at least 1")
