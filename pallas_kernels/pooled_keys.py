"""Which block keys to pool: update lists of one length, after any accepts and rollbacks.

Four index keys make one block key, which stays valid as long as its positions do. `retained` counts
the leading blocks whose keys are valid; a rollback to length n keeps min(retained, n // 4) of them.
After new keys are written up to length n', blocks retained .. n' // 4 - 1 have to be pooled. A list
always has the same number of rows, so that one program serves every update, the empty one included:

    real      block retained + i                  first and in order
    filler    block i - count, unchanged          where there are that many blocks
    scratch   row i beyond all blocks             where there are not

Destinations are distinct in every case: the real blocks are the last ones, and the fillers the
first. Method: "Over 107tok/s Qwen3.8-Flash-Next on M3 Ultra" (2026), Algorithms 1 to 3, in the form
that they take where cells are positions; `block_descriptors.py` has the general form.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

POSITIONS = 4
"""Positions of a block."""


class UpdateList(eqx.Module):
    """Rows of an update.

    Attributes:
      blocks: source block of each row.
      destinations: row of the pooled keys that it goes to; all distinct.
      real: whether the block has to be pooled.
      filler: whether the block is valid already, and pooling it again would change nothing.
    """

    blocks: Int[Array, " rows"]
    destinations: Int[Array, " rows"]
    real: Bool[Array, " rows"]
    filler: Bool[Array, " rows"]


def retained_after(retained: Int[Array, ""], length: Int[Array, ""]) -> Int[Array, ""]:
    """Returns how many leading block keys are valid after a rollback to `length` positions."""
    return jnp.minimum(retained, length // POSITIONS)


def update_list(
    retained: Int[Array, ""], complete: Int[Array, ""], rows: int, capacity: int
) -> UpdateList:
    """Returns the update that pools the first blocks from `retained` on.

    Args:
      retained: leading blocks whose keys are valid.
      complete: blocks all of whose index keys are written; at least `retained`.
      rows: length of the list. A longer update takes several lists: `retained` grows by `rows`.
      capacity: blocks that there is room for; scratch rows lie beyond.
    """
    row = jnp.arange(rows)
    count = jnp.clip(complete - retained, 0, rows)
    real = row < count
    filler = ~real & (complete >= rows)
    blocks = jnp.where(real, retained + row, jnp.where(filler, row - count, 0))
    destinations = jnp.where(real | filler, blocks, capacity + row)
    return UpdateList(blocks=blocks, destinations=destinations, real=real, filler=filler)


def mean_keys(
    raw: Float[Array, "layers capacity width"], layer, blocks: Int[Array, " rows"]
) -> Float[Array, "rows width"]:
    """Returns the mean of each block's index keys in float32, rounded to the type they are kept in.

    The sum is in order of position, so that it has the same bits in every program.
    """
    at = blocks[:, None] * POSITIONS + jnp.arange(POSITIONS)[None]
    keys = raw[layer, at].astype(jnp.float32)
    total = ((keys[:, 0] + keys[:, 1]) + keys[:, 2]) + keys[:, 3]
    return (total * jnp.float32(1 / POSITIONS)).astype(raw.dtype).astype(jnp.float32)


def store_keys(
    pooled: Float[Array, "layers rows width"],
    layer,
    keys: Float[Array, "n width"],
    updates: UpdateList,
    rewrite_fillers: bool = False,
) -> Float[Array, "layers rows width"]:
    """Returns the pooled keys with the real rows stored; other rows put back what is there.

    Args:
      pooled: keys of all layers; scratch rows last.
      layer: the layer; may be traced.
      keys: one for each row of the list.
      updates: the list.
      rewrite_fillers: whether filler rows are stored too.
    """
    written = updates.real | updates.filler if rewrite_fillers else updates.real
    old = pooled[layer, updates.destinations]
    new = jnp.where(written[:, None], keys, old)
    return pooled.at[layer, updates.destinations].set(new, unique_indices=True)
