"""Rows sorted by expert and cut into tiles of one expert, so that its weights are read once."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

TILE = 8
"""Rows of a tile: the rows of a cycle, so that an expert that serves them all takes one tile."""


class ExpertTiles(eqx.Module):
    """The order in which pairs of a row and one of its experts are computed.

    Attributes:
      order: pairs by expert, pairs of one expert in order of row.
      first_tile: first tile of each expert, and the number of tiles after the last.
      first_pair: first pair of each expert in `order`.
      counts: pairs of each expert.
    """

    order: Int[Array, " pairs"]
    first_tile: Int[Array, " experts_and_one"]
    first_pair: Int[Array, " experts"]
    counts: Int[Array, " experts"]

    @property
    def num_tiles(self) -> Int[Array, ""]:
        """Tiles of all experts."""
        return self.first_tile[-1]

    def tile(self, i) -> tuple[Int[Array, ""], Int[Array, " tile"], Bool[Array, " tile"]]:
        """Returns the expert of tile i, its pairs (indices into `chosen`), and which count."""
        expert = jnp.searchsorted(self.first_tile, i, side="right") - 1
        at = (i - self.first_tile[expert]) * TILE + jnp.arange(TILE)
        pairs = jnp.minimum(self.first_pair[expert] + at, self.order.shape[0] - 1)
        return expert, self.order[pairs], at < self.counts[expert]


def expert_tiles(
    chosen: Int[Array, "rows used"], live: Bool[Array, " rows"], num_experts: int
) -> ExpertTiles:
    """Returns the tiles of all live rows.

    Args:
      chosen: experts of each row, distinct within a row.
      live: rows that count; others take no part.
      num_experts: experts there are.
    """
    experts = jnp.where(live[:, None], chosen, num_experts).reshape(-1)
    counts = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
    tiles = jnp.cumsum((counts + TILE - 1) // TILE)
    return ExpertTiles(
        order=jnp.argsort(experts, stable=True).astype(jnp.int32),
        first_tile=jnp.concatenate([jnp.zeros(1, jnp.int32), tiles]),
        first_pair=jnp.cumsum(counts) - counts,
        counts=counts,
    )
