"""Update lists as the golden files write them."""

import numpy as np

from pallas_kernels.pooled_keys import UpdateList


def rows_of(updates: UpdateList) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns blocks, destinations and kinds: 1 real, 2 filler, 0 scratch."""
    kinds = np.where(updates.real, 1, np.where(updates.filler, 2, 0))
    return np.asarray(updates.blocks), np.asarray(updates.destinations), kinds
