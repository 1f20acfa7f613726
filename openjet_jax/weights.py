"""A model's weights as one pytree of packed, stacked arrays, and `project`, which applies them.

A `Packed` holds one projection of every layer that has it, stacked by format: real files mix
formats over layers, and which layer has which is a static table. The layer index is an operand, so
a layer loop is one program however deep the model. Nothing here knows where weights come from.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt, UInt8

from pallas_kernels.formats import FORMATS
from pallas_kernels.packed import Planes


class Packed(eqx.Module):
    """One projection, `y = x @ W.T`, over the layers that have it.

    Attributes:
      stacks: for each format in use, its planes [layers with that format, rows, per row].
      formats: the name of each stack's format.
      table: for each layer, (index of its stack, slot inside it).
      shape: (rows, k) of W: outputs and inputs.
      parts: rows of each projection, where several of the same activations stand one below the
        other (`tiling`); empty for a projection alone.
    """

    stacks: tuple[Planes, ...]
    formats: tuple[str, ...] = eqx.field(static=True)
    table: tuple[tuple[int, int], ...] = eqx.field(static=True)
    shape: tuple[int, int] = eqx.field(static=True)
    parts: tuple[int, ...] = eqx.field(static=True, default=())

    def dense(
        self, layer: Int[Array, ""] | int, part: tuple[Int[Array, ""], int] | None = None
    ) -> Float[Array, "rows k"]:
        """Returns the float32 values of one layer's matrix, unpacked inside the computation.

        Args:
          layer: position among the layers that have this projection.
          part: (i, n) for rows i n to i n + n - 1 alone: those of an expert.
        """

        def unpack(index: int, slot):
            first, count = (0, self.shape[0]) if part is None else (part[0] * part[1], part[1])
            planes = {
                name: jax.lax.dynamic_slice(plane, (slot, first, 0), (1, count, plane.shape[2]))[0]
                for name, plane in self.stacks[index].items()
            }
            return FORMATS[self.formats[index]].unpack(planes)

        return _by_format(unpack, self.table, len(self.stacks), layer)

    def row_planes(self, ids: Int[Array, " n"], layer: int = 0) -> Planes:
        """Returns the packed planes of some rows of one layer's matrix, [n, per row] each."""
        index, slot = self.table[layer]
        return {name: plane[slot, ids] for name, plane in self.stacks[index].items()}

    def unpack(self, planes: Planes, layer: int = 0) -> Float[Array, "n k"]:
        """Returns the float32 values of planes that are in the format of one layer."""
        return FORMATS[self.formats[self.table[layer][0]]].unpack(planes)

    def rows(self, ids: Int[Array, " n"], layer: int = 0) -> Float[Array, "n k"]:
        """Returns the float32 values of some rows of one layer's matrix (an embedding look-up)."""
        return self.unpack(self.row_planes(ids, layer), layer)


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


class Tiled(eqx.Module):
    """One projection in the order in which the decode kernels of an sm_90 GPU read it.

    Attributes:
      stacks: for each format in use, its words [layers with that format, units, words a unit].
      formats, table, shape, parts: as in `Packed`.
      paired: whether the rows of two parts alternate by eights, gates first.
      packed: the same matrix by rows, kept only where rows of it are looked up.
    """

    stacks: tuple[UInt[Array, "layers units words"], ...]
    formats: tuple[str, ...] = eqx.field(static=True)
    table: tuple[tuple[int, int], ...] = eqx.field(static=True)
    shape: tuple[int, int] = eqx.field(static=True)
    parts: tuple[int, ...] = eqx.field(static=True, default=())
    paired: bool = eqx.field(static=True, default=False)
    packed: Packed | None = None

    def row_planes(self, ids: Int[Array, " n"], layer: int = 0) -> Planes:
        """Returns the packed planes of some rows of one layer's matrix, [n, per row] each.

        Raises:
          ValueError: the rows were not kept.
        """
        if self.packed is None:
            raise ValueError(
                f"the rows of this {self.shape} matrix were not kept when it was tiled"
            )
        return self.packed.row_planes(ids, layer)

    def unpack(self, planes: Planes, layer: int = 0) -> Float[Array, "n k"]:
        """Returns the float32 values of planes that are in the format of one layer."""
        return FORMATS[self.formats[self.table[layer][0]]].unpack(planes)

    def product(
        self,
        x: Float[Array, "n k"] | LayerInput,
        layer: Int[Array, ""] | int,
        *,
        first: int = 0,
        epilogue: Literal["none", "silu_gate"] = "none",
    ) -> Array:
        """Returns `x @ W[layer, first:].T` in float32.

        Args:
          x: activations.
          layer: position among the layers that have this projection; may be traced.
          first: rows of W to leave out, a multiple of 16.
          epilogue: "silu_gate" of paired projections gives `silu(gate) * up`.
        """
        if not isinstance(x, LayerInput):
            x = LayerInput(values=x, prepared=(), count=x.shape[0])

        def run(index: int, slot) -> Array:
            at = jnp.reshape(jnp.asarray(slot, jnp.int32), 1)
            operands = (self.stacks[index], at, self.formats[index], epilogue, first)
            if x.count > 16:
                return _prefill(x, *operands)
            return _decode(x, *operands, known=isinstance(layer, int))

        return _by_format(run, self.table, len(self.stacks), layer)[: x.count]


# Mosaic takes a second to import, and only an sm_90 GPU needs it.


def _decode(
    x: LayerInput, words: Array, layer: Array, name: str, epilogue, first: int, *, known: bool
) -> Array:
    """Returns a product of at most 16 rows, padded to 8 or 16.

    Where the layer is known when compiling, weights are fetched before the kernel before has ended.
    """
    from pallas_kernels.decode_blocks import BLOCKS, WEIGHTS
    from pallas_kernels.decode_cuts import default_tiles
    from pallas_kernels.decode_inputs import decode_inputs
    from pallas_kernels.decode_product import decode_product

    block, padded = BLOCKS[name], 8 if x.count <= 8 else 16
    activations = next((made for made in x.prepared if made.operand == block.operand), None)
    if activations is None:
        assert x.values is not None
        rows = jnp.pad(x.values, ((0, padded - x.count), (0, 0)))
        activations = decode_inputs(rows, block).activations
    outputs, k = words.shape[1] * 16 - first, words.shape[2] // block.words * WEIGHTS
    tiles = default_tiles(block, outputs, k, rows=padded)
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


class Within(eqx.Module):
    """A projection whose rows are a part of the matrix of one before it in its module."""


def _by_format(run, table: tuple[tuple[int, int], ...], num_stacks: int, layer) -> Array:
    """Returns `run(stack, slot)` of a layer; a traced layer goes through a switch over formats."""
    if isinstance(layer, int):
        return run(*table[layer])
    if num_stacks == 1:
        return run(0, layer)
    stack = jnp.array([s for s, _ in table])[layer]
    slot = jnp.array([s for _, s in table])[layer]
    branches = [lambda slot, i=i: run(i, slot) for i in range(num_stacks)]
    return jax.lax.switch(stack, branches, slot)


Projection = Packed | Tiled
PartProjection = Projection | Within
"""A projection that `tiling` may join with those before it."""


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
        return gate.product(x, layer, epilogue="silu_gate")
    return jax.nn.silu(project(x, gate, layer)) * project(x, up, layer)


def _product(
    x: Array | LayerInput, weight: PartProjection, layer: Int[Array, ""] | int, first: int = 0
) -> Array:
    """Returns `x @ W[layer, first:].T`."""
    if isinstance(weight, Within):
        raise ValueError("this projection is a part of another's matrix; use project_each")
    if isinstance(weight, Tiled):
        return weight.product(x, layer, first=first)
    values = x.values if isinstance(x, LayerInput) else x
    assert values is not None
    return jnp.matmul(values, weight.dense(layer)[first:].T, precision="highest")


class RowTable(eqx.Module):
    """A table of packed rows, each in one piece, so that a look-up touches one place in memory.

    Attributes:
      rows: bytes of each row: its planes one after the other.
      format: name of the packed format.
      width: values of a row.
    """

    rows: UInt8[Array, "rows row_bytes"]
    format: str = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def take(self, ids: Int[Array, " n"]) -> Float[Array, "n width"]:
        """Returns the float32 values of some rows."""
        rows, planes, at = self.rows[ids], {}, 0
        for name, spec in FORMATS[self.format].plane_specs(1, self.width).items():
            dtype, size = np.dtype(spec.dtype), spec.shape[1]
            part = rows[:, at : at + size * dtype.itemsize]
            if dtype.itemsize > 1:
                part = part.reshape(len(ids), size, dtype.itemsize)
            planes[name] = jax.lax.bitcast_convert_type(part, dtype)
            at += size * dtype.itemsize
        return FORMATS[self.format].unpack(planes)


class FeedForwardWeights(eqx.Module):
    """SwiGLU blocks: `down(silu(gate h) * up h)` with `h = rms_norm(x, norm)`."""

    norm: Float[Array, "layers hidden"]
    gate: Projection
    up: PartProjection
    down: Projection

    @property
    def readers(self) -> tuple[PartProjection, ...]:
        """The projections of a layer's input."""
        return self.gate, self.up


class AttentionWeights(eqx.Module):
    """Gated attention. Rows of `q` are, per head, the query and then its gate.

    `norm` is None where it is not a norm of the residual stream that feeds a layer. `kernels` says
    whether a cycle's rows go through the kernel for an sm_90 GPU, where there is one for the sizes.
    """

    norm: Float[Array, "layers hidden"] | None
    q: Projection
    k: PartProjection
    v: PartProjection
    out: Projection
    q_norm: Float[Array, "layers head_width"]
    k_norm: Float[Array, "layers head_width"]
    kernels: bool = eqx.field(static=True, default=False)

    @property
    def readers(self) -> tuple[PartProjection, ...]:
        """The projections of a layer's input, as `project_each` takes them."""
        return self.q, self.k, self.v


class DeltaNetWeights(eqx.Module):
    """Gated DeltaNet layers. Value heads stand in the file's tiled order.

    `norm` is None where it is not a norm of the residual stream that feeds a layer. `kernels` says
    whether a cycle's rows go through the kernel for an sm_90 GPU, where there is one for the sizes.
    """

    norm: Float[Array, "layers hidden"] | None
    qkv: Projection
    gate: PartProjection
    alpha: PartProjection
    beta: PartProjection
    conv: Float[Array, "layers channels taps"]
    dt_bias: Float[Array, "layers value_heads"]
    decay: Float[Array, "layers value_heads"]
    gate_norm: Float[Array, "layers gdn_width"]
    out: Projection
    kernels: bool = eqx.field(static=True, default=False)

    @property
    def readers(self) -> tuple[PartProjection, ...]:
        """The projections of a layer's input, as `project_each` takes them."""
        return self.qkv, self.gate, self.alpha, self.beta


class DraftHead(eqx.Module):
    """A head over part of the vocabulary, for drafts alone.

    Attributes:
      head: packed rows, one layer; a copy in the head's format or in a smaller one.
      ids: token id of each row.
      member: whether a token id has a row here.
    """

    head: Projection
    ids: Int[Array, " rows"]
    member: Bool[Array, " vocab"]

    @property
    def whole(self) -> bool:
        """Whether every token has a row."""
        return self.ids.shape == self.member.shape


class MtpWeights(eqx.Module):
    """The block that predicts the token after next; every stack in it has one layer.

    `embedding` and `head` are None where the block shares the trunk's; `draft` is None where
    drafts are made over the full vocabulary.
    """

    embed_norm: Float[Array, " hidden"]
    hidden_norm: Float[Array, " width"]
    join: Projection
    attention: AttentionWeights
    embedding: Packed | None
    head: Projection | None
    draft: DraftHead | None = eqx.field(default=None, kw_only=True)


class Weights(eqx.Module):
    """What every model has; None where no layer is of a kind."""

    embedding: Packed
    deltanet: DeltaNetWeights | None
    attention: AttentionWeights | None
    head: Projection
    mtp: MtpWeights | None

    @property
    def kernels(self) -> bool:
        """Whether a cycle's rows go through the kernels for an sm_90 GPU."""
        mixers = (self.deltanet, self.attention)
        return any(mixer.kernels for mixer in mixers if mixer is not None)


class Qwen35MtpWeights(MtpWeights):
    """The MTP block of a qwen35 model."""

    ffn: FeedForwardWeights
    head_norm: Float[Array, " hidden"]


class Qwen35Weights(Weights):
    """All weights of a qwen35 model."""

    ffn: FeedForwardWeights
    final_norm: Float[Array, " hidden"]
    mtp: Qwen35MtpWeights | None
