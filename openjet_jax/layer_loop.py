"""The loop over a model's layers, so that compile time does not grow with depth.

The pattern of layer kinds is cut into repeating units, and each unit into runs of one kind; units
and runs are loops on the device, over stacked weights.
"""

import itertools
from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Int

type Layer[C] = Callable[[str, Int[Array, ""], Int[Array, ""], C], C]
"""(kind, index among all layers, index among the layers of the kind, carry) -> carry."""


def pattern_period(kinds: tuple[str, ...]) -> int:
    """Returns the shortest period of the layer pattern; its length where it never repeats."""
    size = len(kinds)
    for period in range(1, size):
        if size % period == 0 and kinds == kinds[:period] * (size // period):
            return period
    return size


def run_layers[C](kinds: tuple[str, ...], carry: C, layer: Layer[C]) -> C:
    """Returns the carry after all layers, in order.

    Args:
      kinds: the kind of each layer.
      carry: a pytree; every layer returns one of the same shapes.
      layer: runs one layer. It is traced once for each run of a unit; kind is static.
    """
    period = pattern_period(kinds)
    unit = kinds[:period]
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(unit)]

    def run_unit(i, carry):
        at, seen = i * period, {kind: i * unit.count(kind) for kind in unit}
        for kind, count in runs:
            index = seen[kind]

            def body(j, carry, kind=kind, at=at, index=index):
                with jax.named_scope(kind):
                    return layer(kind, at + j, index + j, carry)

            carry = lax.fori_loop(0, count, body, carry)
            at, seen[kind] = at + count, index + count
        return carry

    return lax.fori_loop(0, len(kinds) // period, run_unit, carry)
