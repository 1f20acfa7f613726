"""Products with projections: plain, or by the kernels of an sm_90 GPU for weights in their order.

What a layer's products read is made once, and shared: `prepared_input`. A layer index that is known
when compiling picks a layer's format then; a traced one goes through a switch over formats.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openjet_jax.weights import Packed, PartProjection, Projection, Tiled, Within, by_format


class LayerInput(eqx.Module):
    """Rows that several projections read, prepared for the kernels once.

    Attributes:
      values: the rows; None where kernels alone read them.
      prepared: the same rows, as products with each kind of block read them, or as those of many
        rows do.
      count: how many rows.
    """

    values: Float[Array, "n k"] | None
    prepared: tuple[Any, ...]
    count: int = eqx.field(static=True)


def project(
    x: Float[Array, "n k"] | LayerInput, weight: PartProjection, layer: Int[Array, ""] | int = 0
) -> Float[Array, "n rows"]:
    """Returns `x @ W[layer].T` in float32.

    Args:
      x: activations.
      weight: the packed projection, or its tiled form, which picks the kernel.
      layer: position among the layers that have this projection; may be traced.

    Raises:
      ValueError: the projection has no matrix of its own; see `project_each`.
    """
    return _product(x, weight, layer)


def project_each(
    x: Float[Array, "n k"] | LayerInput,
    weights: Sequence[PartProjection],
    layer: Int[Array, ""] | int = 0,
    *,
    skip: int = 0,
) -> list[Float[Array, "n _"]]:
    """Returns `x @ W[layer].T` of several projections, one product for those that share a matrix.

    Args:
      x: activations.
      weights: projections in the order in which `tiling` may have joined them.
      layer: position among the layers that have them; may be traced.
      skip: how many of the first ones are left out.
    """
    parts = project_parts(x, weights, layer, skip=skip)
    return [part.columns for part in parts]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one projection gave: some columns of what a product did.

    Attributes:
      rows: float32 [n, columns], of all projections that share the matrix.
      first: the projection's first column.
      width: its columns.
    """

    rows: Array
    first: int
    width: int

    @property
    def columns(self) -> Float[Array, "n width"]:
        """The projection's own output."""
        return self.rows[:, self.first : self.first + self.width]


def project_parts(
    x: Float[Array, "n k"] | LayerInput,
    weights: Sequence[PartProjection],
    layer: Int[Array, ""] | int = 0,
    *,
    skip: int = 0,
) -> list[Part]:
    """Returns what `project_each` does, for kernels that read columns where they are."""
    outputs, at = [], 0
    while at < len(weights):
        weight = weights[at]
        widths = () if isinstance(weight, Within) else weight.parts
        passed, at = max(0, skip - at), at + max(1, len(widths))
        if at <= skip:
            continue
        start = sum(widths[:passed])
        # Kernels leave out whole units of 16 rows.
        out = _product(x, weight, layer, first=start - start % 16)
        first = start % 16
        for width in widths[passed:] or (out.shape[1] - first,):
            outputs.append(Part(out, first, width))
            first += width
    return outputs


def prepared_input(
    x: Float[Array, "n k"],
    added: Float[Array, "n k"],
    norm: Float[Array, "layers k"],
    layer: Int[Array, ""] | int,
    eps: float,
    readers: Sequence[PartProjection],
) -> tuple[Float[Array, "n k"], LayerInput]:
    """Returns x + added, and its normed rows ready for products, all made in one launch.

    Rows of a cycle are prepared for the kinds of block that the layer's readers have; where it is
    traced, for the kind that most of their layers have.

    Args:
      x: the residual stream: 8 or 16 rows, or more than 16.
      added: what the block before gives to it.
      norm: weights of the norm.
      layer: whose norm; may be traced.
      eps: of the norm.
      readers: projections of the normed rows, at least one of them tiled.
    """
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_inputs import decode_inputs
    from pallas_kernels.prefill_inputs import prefill_inputs

    at = jnp.reshape(jnp.asarray(layer, jnp.int32), 1)
    normed = {"added": added, "norm": norm, "layer": at, "eps": eps}
    tiled = [weight for weight in readers if isinstance(weight, Tiled)]
    if x.shape[0] > 16:
        wanted = any(isinstance(weight, Packed) for weight in readers)
        made = prefill_inputs(x, **normed, wants_normed=wanted)
        rows = LayerInput(values=made.normed, prepared=(made.activations,), count=x.shape[0])
        return made.stream, rows
    known = isinstance(layer, int)
    tables = [(weight, [weight.table[layer]] if known else weight.table) for weight in tiled]
    blocks = [BLOCKS[weight.formats[i]] for weight, table in tables for i, _ in table]
    kinds = collections.Counter(block.operand for block in blocks).most_common(2 if known else 1)
    block, *also = (next(b for b in blocks if b.operand == kind) for kind, _ in kinds)
    made = decode_inputs(x, block, **normed, also=also[0] if also else None)
    prepared = tuple(a for a in (made.activations, made.also) if a is not None)
    return made.stream, LayerInput(values=made.normed, prepared=prepared, count=x.shape[0])


def gated(
    x: Float[Array, "n k"] | LayerInput,
    gate: Projection,
    up: PartProjection,
    layer: Int[Array, ""] | int = 0,
) -> Float[Array, "n rows"]:
    """Returns `silu(x @ gate[layer].T) * (x @ up[layer].T)`, one product where they are paired."""
    if isinstance(gate, Tiled) and gate.paired:
        return _tiled_product(gate, x, layer, epilogue="silu_gate")
    return jax.nn.silu(project(x, gate, layer)) * project(x, up, layer)


def _product(
    x: Array | LayerInput, weight: PartProjection, layer: Int[Array, ""] | int, first: int = 0
) -> Array:
    """Returns `x @ W[layer, first:].T`."""
    if isinstance(weight, Within):
        raise ValueError("this projection is a part of another's matrix; use project_each")
    if isinstance(weight, Tiled):
        return _tiled_product(weight, x, layer, first)
    values = x.values if isinstance(x, LayerInput) else x
    assert values is not None
    return jnp.matmul(values, weight.dense(layer)[first:].T, precision="highest")


def _tiled_product(
    weight: Tiled,
    x: Float[Array, "n k"] | LayerInput,
    layer: Int[Array, ""] | int,
    first: int = 0,
    epilogue: Literal["none", "silu_gate"] = "none",
) -> Array:
    """Returns `x @ W[layer, first:].T` in float32.

    Args:
      weight: the projection.
      x: activations.
      layer: position among the layers that have this projection; may be traced.
      first: rows of W to leave out, a multiple of 16.
      epilogue: "silu_gate" of paired projections gives `silu(gate) * up`.
    """
    if not isinstance(x, LayerInput):
        x = LayerInput(values=x, prepared=(), count=x.shape[0])

    def run(index: int, slot) -> Array:
        at = jnp.reshape(jnp.asarray(slot, jnp.int32), 1)
        operands = (weight.stacks[index], at, weight.formats[index], epilogue, first)
        if x.count > 16:
            return _prefill(x, *operands)
        return _decode(x, *operands, known=isinstance(layer, int))

    return by_format(run, weight.table, len(weight.stacks), layer)[: x.count]


# Mosaic takes a second to import, and only an sm_90 GPU needs it.


def _decode(
    x: LayerInput, words: Array, layer: Array, name: str, epilogue, first: int, *, known: bool
) -> Array:
    """Returns a product of at most 16 rows, padded to 8 or 16.

    Where the layer is known when compiling, weights are fetched before the kernel before has ended.
    """
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_inputs import decode_inputs
    from pallas_kernels.decode_product import decode_product
    from pallas_kernels.decode_words import WEIGHTS
    from pallas_kernels.tile_choice import tiles_for

    block, padded = BLOCKS[name], 8 if x.count <= 8 else 16
    activations = next((made for made in x.prepared if made.operand == block.operand), None)
    if activations is None:
        assert x.values is not None
        rows = jnp.pad(x.values, ((0, padded - x.count), (0, 0)))
        activations = decode_inputs(rows, block).activations
    outputs, k = words.shape[1] * 16 - first, words.shape[2] // block.words * WEIGHTS
    device = jax.devices()[0].device_kind
    tiles = tiles_for(block, outputs, k, padded, epilogue, device)
    tiles = dataclasses.replace(tiles, overlap=known)
    return decode_product(activations, words, layer, block, tiles, epilogue, first=first)


def _prefill(x: LayerInput, words: Array, layer: Array, name: str, epilogue, first: int) -> Array:
    """Returns a product of many rows, padded to whole tiles."""
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.prefill_inputs import prefill_inputs
    from pallas_kernels.prefill_product import prefill_product

    if x.prepared:
        (activations,) = x.prepared
    else:
        assert x.values is not None
        activations = prefill_inputs(x.values).activations
    return prefill_product(activations, words, layer, BLOCKS[name], epilogue, first=first)
