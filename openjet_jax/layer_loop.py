"""The loop over a model's layers.

As a loop on the device, compile time does not grow with depth: the pattern of layer kinds is cut
into repeating units, and each unit into runs of one kind; units and runs are loops over stacked
weights. Unrolled, every layer's index is known: formats that differ from layer to layer need no
branch, and all launches of a cycle go to the GPU at once. Its kernels are traced and compiled once
all the same, since they take the index as an operand.
"""

import itertools
from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Int

type Layer[C] = Callable[[str, Int[Array, ""] | int, Int[Array, ""] | int, C], C]
"""(kind, index among all layers, index among the layers of the kind, carry) -> carry."""


def pattern_period(kinds: tuple[str, ...]) -> int:
    """Returns the shortest period of the layer pattern; its length where it never repeats."""
    size = len(kinds)
    for period in range(1, size):
        if size % period == 0 and kinds == kinds[:period] * (size // period):
            return period
    return size


def run_layers[C](
    kinds: tuple[str, ...], carry: C, layer: Layer[C], *, unrolled: bool = False
) -> C:
    """Returns the carry after all layers, in order.

    Args:
      kinds: the kind of each layer.
      carry: a pytree; every layer returns one of the same shapes.
      layer: runs one layer. It is traced once for each run of a unit; kind is static.
      unrolled: whether it is traced for every layer instead, with its indices known.
    """
    if unrolled:
        for at, kind in enumerate(kinds):
            with jax.named_scope(kind):
                carry = layer(kind, at, kinds[:at].count(kind), carry)
        return carry
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
