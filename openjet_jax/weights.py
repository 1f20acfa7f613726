"""A model's weights as one pytree of packed, stacked arrays, and `project`, which applies them.

A `Packed` holds one projection of every layer that has it, stacked by format: real files mix
formats over layers, and which layer has which is a static table. The layer index is an operand, so
a layer loop is one program however deep the model. Nothing here knows where weights come from.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats import FORMATS
from pallas_kernels.packed import Planes


class Packed(eqx.Module):
    """One projection, `y = x @ W.T`, over the layers that have it.

    Attributes:
      stacks: for each format in use, its planes [layers with that format, rows, per row].
      formats: the name of each stack's format.
      table: for each layer, (index of its stack, slot inside it).
      shape: (rows, k) of W: outputs and inputs.
    """

    stacks: tuple[Planes, ...]
    formats: tuple[str, ...] = eqx.field(static=True)
    table: tuple[tuple[int, int], ...] = eqx.field(static=True)
    shape: tuple[int, int] = eqx.field(static=True)

    def dense(self, layer: Int[Array, ""] | int) -> Float[Array, "rows k"]:
        """Returns the float32 values of one layer's matrix, unpacked inside the computation."""

        def unpack(index: int, slot):
            planes = {
                name: jax.lax.dynamic_index_in_dim(plane, slot, keepdims=False)
                for name, plane in self.stacks[index].items()
            }
            return FORMATS[self.formats[index]].unpack(planes)

        if isinstance(layer, int):
            return unpack(*self.table[layer])
        if len(self.stacks) == 1:
            return unpack(0, layer)
        stack = jnp.array([s for s, _ in self.table])[layer]
        slot = jnp.array([s for _, s in self.table])[layer]
        branches = [lambda slot, i=i: unpack(i, slot) for i in range(len(self.stacks))]
        return jax.lax.switch(stack, branches, slot)

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


def project(
    x: Float[Array, "n k"], weight: Packed, layer: Int[Array, ""] | int = 0
) -> Float[Array, "n rows"]:
    """Returns `x @ W[layer].T` in float32.

    Args:
      x: activations.
      weight: the packed projection.
      layer: position among the layers that have this projection; may be traced.
    """
    return jnp.matmul(x, weight.dense(layer).T, precision="highest")


class FeedForwardWeights(eqx.Module):
    """SwiGLU blocks: `down(silu(gate h) * up h)` with `h = rms_norm(x, norm)`."""

    norm: Float[Array, "layers hidden"]
    gate: Packed
    up: Packed
    down: Packed


class AttentionWeights(eqx.Module):
    """Gated full attention. Rows of `q` are, per head, the query and then its gate."""

    norm: Float[Array, "layers hidden"]
    q: Packed
    k: Packed
    v: Packed
    out: Packed
    q_norm: Float[Array, "layers head_width"]
    k_norm: Float[Array, "layers head_width"]


class DeltaNetWeights(eqx.Module):
    """Gated DeltaNet layers. Value heads stand in the file's tiled order."""

    norm: Float[Array, "layers hidden"]
    qkv: Packed
    gate: Packed
    alpha: Packed
    beta: Packed
    conv: Float[Array, "layers channels taps"]
    dt_bias: Float[Array, "layers value_heads"]
    decay: Float[Array, "layers value_heads"]
    gate_norm: Float[Array, "layers gdn_width"]
    out: Packed


class DraftHead(eqx.Module):
    """A head over part of the vocabulary, for drafts alone.

    Attributes:
      head: packed rows, one layer; a copy in the head's format or in a smaller one.
      ids: token id of each row.
      member: whether a token id has a row here.
    """

    head: Packed
    ids: Int[Array, " rows"]
    member: Bool[Array, " vocab"]


class MtpWeights(eqx.Module):
    """The block that predicts the token after next; every stack in it has one layer.

    `embedding` and `head` are None where the block shares the trunk's; `draft` is None where
    drafts are made over the full vocabulary.
    """

    embed_norm: Float[Array, " hidden"]
    hidden_norm: Float[Array, " hidden"]
    join: Packed
    attention: AttentionWeights
    ffn: FeedForwardWeights
    head_norm: Float[Array, " hidden"]
    embedding: Packed | None
    head: Packed | None
    draft: DraftHead | None = None


class Weights(eqx.Module):
    """All weights of a model. `attention` or `deltanet` is None where no layer is of that kind."""

    embedding: Packed
    deltanet: DeltaNetWeights | None
    attention: AttentionWeights | None
    ffn: FeedForwardWeights
    final_norm: Float[Array, " hidden"]
    head: Packed
    mtp: MtpWeights | None
