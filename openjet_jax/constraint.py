"""What tells the device which tokens may come next: the interface that grammars implement."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jaxtyping import UInt32

from openjet_jax.state import DecodeState


class Constraint(Protocol):
    """A language of token sequences, at one position in it.

    The mask of a row is a function of the tokens before it alone, so constrained text depends on
    drafts no more than any other text.
    """

    def masks(self, drafts: Sequence[int]) -> UInt32[np.ndarray, "rows words"]:
        """Returns what may follow the tokens so far, and these with each prefix of `drafts`.

        Bits are as in `Request.allowed`. Rows after a draft that is not allowed may hold anything:
        the draft will be rejected.
        """
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Moves past tokens that were emitted."""
        ...


def restricted(state: DecodeState, constraint: Constraint) -> DecodeState:
    """Returns the state with what the rows of its next cycle may choose."""
    drafts, num_drafts = jax.device_get((state.drafts, state.num_drafts))
    allowed = jax.device_put(constraint.masks(drafts[: int(num_drafts)].tolist()))
    request = dataclasses.replace(state.request, allowed=allowed)
    return dataclasses.replace(state, request=request)
