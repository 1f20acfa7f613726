"""A model's weights as one pytree of packed, stacked arrays; `projections.py` applies them.

A `Packed` holds one projection of every layer that has it, stacked by format: real files mix
formats over layers, and which layer has which is a static table. The layer index is an operand, so
a layer loop is one program however deep the model. Nothing here knows where weights come from.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt, UInt8

from pallas_kernels.formats import FORMATS
from pallas_kernels.packed import Planes


def by_format(run, table: tuple[tuple[int, int], ...], num_stacks: int, layer) -> Array:
    """Returns `run(stack, slot)` of a layer; a traced layer goes through a switch over formats."""
    if isinstance(layer, int):
        return run(*table[layer])
    if num_stacks == 1:
        return run(0, layer)
    stack = jnp.array([s for s, _ in table])[layer]
    slot = jnp.array([s for _, s in table])[layer]
    branches = [lambda slot, i=i: run(i, slot) for i in range(num_stacks)]
    return jax.lax.switch(stack, branches, slot)


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

        return by_format(unpack, self.table, len(self.stacks), layer)

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


class Within(eqx.Module):
    """A projection whose rows are a part of the matrix of one before it in its module."""


Projection = Packed | Tiled
PartProjection = Projection | Within
"""A projection that `tiling` may join with those before it."""


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
