"""A checkpoint's weights with the head that drafts are made with: packed, or for the kernels."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from openjet_jax.checkpoint import CheckpointConfig
from openjet_jax.draft_list import DraftList
from openjet_jax.draft_vocabulary import with_draft_head
from openjet_jax.placing import Planning, Sending
from openjet_jax.stacks import Reader, load_weights, sent, unread
from openjet_jax.tiling import tiled_weights
from openjet_jax.weights import Weights


def load_packed(directory: Path, config: CheckpointConfig, draft: DraftList | None) -> Weights:
    """Returns a checkpoint's weights as they are; see `load_tiled`."""
    _, weights = load_weights(directory)
    return _with_drafts(weights, config, draft)


def _with_drafts(weights: Weights, config: CheckpointConfig, draft: DraftList | None) -> Weights:
    if draft is None:
        return weights
    vocab = config.model.vocab
    return with_draft_head(weights, draft.head_rows(vocab), vocab, draft.head)


def load_tiled(directory: Path, config: CheckpointConfig, draft: DraftList | None) -> Weights:
    """Returns a checkpoint's weights in the kernels' order: see `placing`.

    Args:
      directory: of the checkpoint.
      config: its contents.
      draft: the tokens that drafts are made of; None for a model that makes none.

    Raises:
      CheckpointError: as `load_weights`.
    """
    weights = unread(config)
    # Rows of the head are copied for drafts, so it is there before the rest.
    heads = [weights.head, weights.mtp.head if weights.mtp is not None else None]
    first = jax.tree.leaves(heads if draft is not None else None)

    def with_heads(arrays: Iterable[Any]) -> Weights:
        found = dict(zip(map(id, first), arrays, strict=True))
        return jax.tree.map(lambda leaf: found.get(id(leaf), leaf), weights)

    plan = Planning()
    shapes = with_heads([leaf.spec for leaf in first])
    shapes = eqx.filter_eval_shape(lambda w: _with_drafts(w, config, draft), shapes)
    tiled_weights(shapes, plan)
    with Reader(directory, [*((leaf, None) for leaf in first), *plan.wanted]) as reader:
        with Sending(reader, sent, plan) as sending:
            there = _with_drafts(with_heads([sending.take(leaf) for leaf in first]), config, draft)
            return tiled_weights(there, sending)
