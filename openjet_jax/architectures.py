"""What a model is to the engine: a handful of functions, found by the type of its configuration.

`qwen35.py` and `qwen4exp.py` are the two models: whatever differs between them is in those two
files and in the configurations and weights that they name. Nothing else asks which model it runs.
"""

from typing import Any, Protocol, cast

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openjet_jax import qwen4exp, qwen35
from openjet_jax.config import ROWS, DecodeConfig, ModelConfig, Qwen4ExpConfig, Qwen35Config
from openjet_jax.draft_vocabulary import DraftSlots
from openjet_jax.projections import project
from openjet_jax.state import (
    DecodeState,
    KVCache,
    MtpRows,
    RecurrentState,
    capacity_for,
    empty_request,
)
from openjet_jax.weights import Weights

type Caches = tuple[RecurrentState, KVCache]
"""The trunk's state: what is recurrent, and what is kept by position."""


class Architecture(Protocol):
    """The functions of a model."""

    def initial_caches(self, config: Any, decode: DecodeConfig) -> Caches:
        """Returns the trunk's caches before the first token."""
        ...

    def initial_mtp_cache(self, config: Any, decode: DecodeConfig) -> KVCache:
        """Returns the MTP block's cache before the first token."""
        ...

    def hidden_width(self, config: Any) -> int:
        """Returns the width of a row that the trunk hands to the head and to the MTP block."""
        ...

    def trunk(
        self,
        weights: Any,
        config: Any,
        tokens: Int[Array, " rows"],
        start: Int[Array, ""],
        num_live: Int[Array, ""],
        caches: Any,
        *,
        chunked: bool,
    ) -> tuple[Float[Array, "rows width"], Caches]:
        """Returns output rows, and the caches with those rows.

        Rows pending from the last cycle are folded first. Rows of a cycle are then pending, and the
        caller commits the accepted ones; rows of a chunk are committed.

        Args:
          weights: the model.
          config: its sizes.
          tokens: consecutive tokens; of a chunk, a multiple of the delta rule's chunk.
          start: position of the first.
          num_live: rows that count; later ones are padding, never attended, never written.
          caches: recurrent state, and the cache, valid below `start`.
          chunked: whether the rows are a chunk of known tokens rather than a cycle's.
        """
        ...

    def features(
        self, weights: Any, config: Any, hidden: Float[Array, "rows width"]
    ) -> Float[Array, "rows hidden"]:
        """Returns the rows that the head projects, from the trunk's output rows."""
        ...

    def mtp_features(
        self, weights: Any, config: Any, hidden: Float[Array, "rows width"]
    ) -> Float[Array, "rows hidden"]:
        """Returns the rows that the draft head projects, from the MTP block's output rows."""
        ...

    def mtp_block(
        self,
        rows: MtpRows,
        kv: Any,
        weights: Any,
        config: Any,
        *,
        continues: Bool[Array, ""] | None = None,
    ) -> tuple[Float[Array, "rows width"], KVCache]:
        """Returns output rows, which the next draft is made from, and the block's cache.

        Args:
          rows: what it takes; the live rows are consecutive.
          kv: the block's cache.
          weights: the model; its MTP block must be there.
          config: its sizes.
          continues: whether this drafts on from the last call's newest row; None where the rows
            are known.
        """
        ...

    def mtp_fill(
        self,
        rows: MtpRows,
        kv: Any,
        weights: Any,
        config: Any,
    ) -> KVCache:
        """Returns the block's cache with entries for the live rows; see `mtp_block`.

        With a single layer, only what the cache stores is computed.
        """
        ...


_ARCHITECTURES: dict[type[ModelConfig], Architecture] = {
    Qwen35Config: cast(Architecture, qwen35),
    Qwen4ExpConfig: cast(Architecture, qwen4exp),
}


def architecture_of(config: ModelConfig) -> Architecture:
    """Returns the functions of the model that a configuration describes."""
    return _ARCHITECTURES[type(config)]


def initial_state(
    config: ModelConfig, decode: DecodeConfig, slots: DraftSlots | None = None
) -> DecodeState:
    """Returns the state of an empty conversation.

    Args:
      config: the model.
      decode: context and cache format.
      slots: `empty_slots` of the weights.
    """
    model, zero = architecture_of(config), jnp.int32(0)
    recurrent, kv = model.initial_caches(config, decode)
    return DecodeState(
        tokens=jnp.zeros(capacity_for(decode.context), jnp.int32),
        length=zero,
        kv=kv,
        mtp_kv=model.initial_mtp_cache(config, decode) if config.has_mtp else None,
        recurrent=recurrent,
        hidden=jnp.zeros(model.hidden_width(config)),
        drafts=jnp.zeros(ROWS - 1, jnp.int32),
        num_drafts=zero,
        slots=slots,
        request=empty_request(config.vocab),
        stopped=jnp.bool_(False),
    )


def logits(
    weights: Weights, hidden: Float[Array, "rows width"], *, config: ModelConfig
) -> Float[Array, "rows vocab"]:
    """Returns full-vocabulary logits of trunk output rows; padding vocabulary is not masked."""
    return project(architecture_of(config).features(weights, config, hidden), weights.head)
