"""What is fixed before anything runs: the model's sizes and the shapes decoding is compiled for.

All classes are frozen, hashable and validated on construction. They know no arrays, no files.
"""

import dataclasses
import functools
import math
from typing import ClassVar

ROWS = 8
"""Rows of a cycle: the newest token and up to five drafts, padded to one shape for every depth."""

MAX_DEPTH = 5
"""Most drafts a cycle verifies."""

MAX_STOP_IDS = 16
"""Most token ids at which the device stops by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes that every model here has: Gated DeltaNet, gated attention, one MTP block.

    Attributes:
      num_layers: trunk layers, without the MTP block.
      hidden: width D of the residual stream.
      vocab: rows of the embedding and of the head, padding rows included.
      vocab_used: ids at and above this are padding and are never emitted.
      heads, kv_heads, head_width: attention. Query head h reads KV head h // (heads/kv_heads).
      rotary: leading dimensions of a head that rotate (half-split pairs).
      rope_theta: base of the rotary frequencies.
      key_heads, value_heads, gdn_width: Gated DeltaNet. Value head p reads key head p % key_heads.
      conv_taps: length of the causal depthwise convolution.
      eps: epsilon of every RMS norm and of the q/k L2 norm.
      recurrent: for each trunk layer, whether it is Gated DeltaNet (else attention).
      has_mtp: whether the MTP block is there, so that drafts can be made.
      context: positions the model was trained for.
    """

    architecture: ClassVar[str]
    """Name of the architecture in GGUF files and checkpoints."""

    num_layers: int
    hidden: int
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
        self._require_positive("num_layers hidden vocab heads kv_heads head_width")
        self._require_positive("key_heads value_heads gdn_width context")
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

    def _require_positive(self, names: str) -> None:
        for name in names.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def ffn_width(self) -> int:
        """Widest row of a feed-forward block."""
        raise NotImplementedError

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
        """Trunk indices of the attention layers."""
        return tuple(i for i, r in enumerate(self.recurrent) if not r)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config(ModelConfig):
    """A qwen35 model: every layer adds its mixer, then a SwiGLU block, each behind an RMS norm.

    Attributes:
      ffn: width F of the feed-forward block.
    """

    architecture: ClassVar[str] = "qwen35"

    ffn: int

    def __post_init__(self):
        """Checks every field against the others; raises ValueError naming the first that is off."""
        super().__post_init__()
        self._require_positive("ffn")

    @property
    def ffn_width(self) -> int:
        """Widest row of a feed-forward block."""
        return self.ffn


BLOCK_POSITIONS = 4
"""Positions whose index keys are pooled into one block key."""


MTP_READINGS = {
    "mtp_norm": ("joint", "stream"),
    "mtp_position": ("token", "hidden"),
    "mtp_selection": ("step", "first"),
}
"""How implementations differ in reading the MTP block of qwen4exp; the first is the default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen4ExpConfig(ModelConfig):
    """A qwen4exp model: residual streams, experts, n-gram embeddings, sparse attention.

    Attributes:
      streams: residual streams C, each of width `hidden`.
      stream_rank: width of the bottleneck that computes the gates of the streams.
      experts, experts_used: routed experts of a layer, and how many of them a row takes.
      expert_ffn, shared_ffn: width of a routed expert and of the shared one.
      sparse: for each trunk layer, whether it is sparse attention (an attention layer that is not
        attends to every position).
      mtp_sparse: the same of the MTP block.
      index_heads, index_width: query heads of the indexer, and the width of an index key.
      budget: blocks of `BLOCK_POSITIONS` that a query attends to, its incomplete tail aside.
      ngram_layer: trunk layer whose residual takes the n-gram embedding; a DeltaNet layer.
      ngram: longest n-gram; a shorter one is hashed for each length from 2.
      ngram_heads: hashes for each length.
      ngram_taps: length of the convolution over embedded n-grams, whose dilation is `ngram`.
      ngram_end: token that cuts n-grams and stands for what is missing.
      ngram_multipliers: of a token and its predecessors, newest first.
      ngram_sizes, ngram_offsets: rows of each hash, and where they begin in the table.
      ngram_rows: rows of the table.
      mtp_norm: what the norm of the MTP block's hidden input runs over: "joint", all streams
        together, or "stream", each by itself.
      mtp_position: position in the MTP block of a token and the streams before it: the "token"'s
        own, or that of the streams, "hidden".
      mtp_selection: what a draft attends to: what every "step" selects, or exactly what the "first"
        draft of a cycle did. Without `mtp_sparse`, everything. None of these three changes text.
    """

    architecture: ClassVar[str] = "qwen4exp"

    streams: int
    stream_rank: int
    experts: int
    experts_used: int
    expert_ffn: int
    shared_ffn: int
    sparse: tuple[bool, ...]
    mtp_sparse: bool
    index_heads: int
    index_width: int
    budget: int
    ngram_layer: int
    ngram: int
    ngram_heads: int
    ngram_taps: int
    ngram_end: int
    ngram_multipliers: tuple[int, ...]
    ngram_sizes: tuple[int, ...]
    ngram_offsets: tuple[int, ...]
    ngram_rows: int
    mtp_norm: str = "joint"
    mtp_position: str = "token"
    mtp_selection: str = "step"

    def __post_init__(self):
        """Checks every field against the others; raises ValueError naming the first that is off."""
        super().__post_init__()
        self._require_positive("stream_rank experts expert_ffn shared_ffn")
        self._require_positive("index_heads index_width budget ngram_heads ngram_taps")
        if self.streams < 2:
            raise ValueError(f"{self.streams=} must be at least 2")
        if not 0 < self.experts_used <= self.experts:
            raise ValueError(f"{self.experts_used=} must be in 1..{self.experts}")
        if self.rotary > self.index_width:
            raise ValueError(f"{self.rotary=} must be at most {self.index_width=}")
        if any(s and r for s, r in zip(self.sparse, self.recurrent, strict=True)):
            raise ValueError(f"{self.sparse=} names a layer that {self.recurrent=} does too")
        if not 0 <= self.ngram_layer < self.num_layers or not self.recurrent[self.ngram_layer]:
            raise ValueError(f"{self.ngram_layer=} must be a DeltaNet layer of the trunk")
        if not 2 <= self.ngram <= 8 or len(self.ngram_multipliers) != self.ngram:
            raise ValueError(f"{self.ngram=} must be in 2..8, with a multiplier each")
        hashes = (self.ngram - 1) * self.ngram_heads
        if len(self.ngram_sizes) != hashes or len(self.ngram_offsets) != hashes:
            raise ValueError(f"{self.ngram_sizes=} and {self.ngram_offsets=} must be {hashes}")
        if self.hidden % hashes:
            raise ValueError(f"{self.hidden=} must be a multiple of {hashes=}")
        ends = zip(self.ngram_sizes, self.ngram_offsets, strict=True)
        if any(n < 1 or o < 0 or n + o > self.ngram_rows for n, o in ends):
            raise ValueError(f"{self.ngram_sizes=} must lie in a table of {self.ngram_rows=}")
        if max(self.ngram_multipliers) * (self.vocab - 1) >= 2**63:
            raise ValueError(f"{self.ngram_multipliers=} overflow with {self.vocab=}")
        for name, choices in MTP_READINGS.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {choices}")

    @property
    def ffn_width(self) -> int:
        """Widest row of a feed-forward block."""
        return max(self.shared_ffn, self.width)

    @property
    def width(self) -> int:
        """Numbers in all streams of a position."""
        return self.streams * self.hidden

    @property
    def ngram_history(self) -> int:
        """Rows of the past that the dilated convolution over n-grams reads."""
        return (self.ngram_taps - 1) * self.ngram

    @functools.cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Trunk indices of the sparse attention layers."""
        return tuple(i for i, s in enumerate(self.sparse) if s)


KV_DTYPES = ("float32", "bfloat16", "q8_0")
"""Formats of the key-value cache."""


PADDINGS = (0, 8, 16)
"""Lengths of an update list of block keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pooling:
    """How block keys are maintained. No choice changes text; the others are for comparison.

    Attributes:
      padding: rows of an update list, one of `PADDINGS`; 0 pools block by block, without filler.
      retention: whether block keys outlive a rollback; otherwise every cycle pools all of them.
      rewrite_fillers: whether rows that fill the list pool an unchanged block again and store the
        result, as the method's first implementation does; otherwise they store nothing.
    """

    padding: int = 8
    retention: bool = True
    rewrite_fillers: bool = False

    def __post_init__(self):
        """Raises ValueError naming the field and the limit."""
        if self.padding not in PADDINGS:
            raise ValueError(f"{self.padding=} must be one of {PADDINGS}")


LONG_CHUNK = 2048
"""Rows of a prompt that keep the tensor cores of a large GPU busy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Shapes that programs are compiled for.

    Attributes:
      context: most positions a conversation can hold, prompt and output together.
      kv_dtype: format of the key-value cache, one of `KV_DTYPES`.
      chunks: sizes, in rows, of the prefill programs; a prompt is cut into the largest first.
      cycles_per_dispatch: most cycles the device runs before the host looks.
      pooling: how block keys of sparse attention are maintained; other models have none.
    """

    context: int = 4096
    kv_dtype: str = "float32"
    chunks: tuple[int, ...] = (64, 512)
    cycles_per_dispatch: int = 16
    pooling: Pooling = Pooling()

    def on(self, backend: str) -> "DecodeConfig":
        """Returns the shapes for a backend: kernels take a long prompt in larger chunks."""
        if backend != "mosaic" or self.chunks != DecodeConfig.chunks:
            return self
        return dataclasses.replace(self, chunks=(*self.chunks, LONG_CHUNK))

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
