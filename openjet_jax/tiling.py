"""From packed rows to the order in which the decode kernels read: done once, at loading.

The kernels are for sm_90 GPUs. A projection takes part if every format its layers use has a block
and its sizes are whole blocks; others (the small alpha and beta projections, say) stay packed and
run through the reference.
"""

import dataclasses
import typing
from functools import partial
from typing import Any

import equinox as eqx
import jax

from openjet_jax.weights import AttentionWeights, DeltaNetWeights, Packed, Tiled, Weights

BACKENDS = ("auto", "reference", "mosaic")


def resolve_backend(backend: str) -> str:
    """Returns "mosaic" or "reference".

    Args:
      backend: "auto" takes the kernels where they run; the others are taken at their word.

    Raises:
      ValueError: an unknown backend, or kernels asked for where they do not run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of {', '.join(BACKENDS)}")
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if backend == "mosaic" and capability != "9.0":
        what = f"compute capability {capability}" if capability else device.platform
        raise ValueError(f"{backend=} needs an sm_90 GPU, not {what}; use backend='reference'")
    if backend == "auto":
        return "mosaic" if capability == "9.0" else "reference"
    return backend


def tiled_weights(weights: Weights) -> Weights:
    """Returns the weights with every projection that the kernels can read in their order.

    Attention and DeltaNet layers are marked: a cycle's rows go through their kernels.

    The packed arrays are freed one by one, so that memory peaks at one projection more than the
    model. The embedding stays packed: its rows are looked up.

    Args:
      weights: on the device, and consumed; or shapes alone.
    """
    mtp = weights.mtp
    heads = [weights.head, mtp.head if mtp is not None else None]
    slots = mtp is not None and mtp.draft is not None and not mtp.draft.whole
    looked_up = heads if slots else []
    shared = {id(plane) for plane in jax.tree.leaves(weights.embedding)}

    def visit(node: Any) -> Any:
        if isinstance(node, Packed):
            rows = any(node is head for head in looked_up)
            return tiled(node, keep_rows=rows, keep=shared)
        changed = {
            field.name: visit(child)
            for field in dataclasses.fields(node)
            if isinstance(child := getattr(node, field.name), eqx.Module)
            # What is looked up by rows, or by expert, is declared as packed.
            and not (isinstance(child, Packed) and Tiled not in typing.get_args(field.type))
        }
        if isinstance(node, AttentionWeights | DeltaNetWeights):
            changed["kernels"] = True
        return dataclasses.replace(node, **changed)

    embeddings = {"embedding": weights.embedding}
    changed = visit(dataclasses.replace(weights, embedding=None))
    return dataclasses.replace(changed, **embeddings)


def tiled(
    weight: Packed, *, keep_rows: bool, keep: set[int] | frozenset[int] = frozenset()
) -> Packed | Tiled:
    """Returns one projection in the kernels' order, or as it is where they cannot read it.

    Args:
      weight: the packed projection.
      keep_rows: whether rows of it will be looked up; else the packed arrays are freed.
      keep: `id` of arrays that belong to something else too and are not freed.
    """
    from pallas_kernels.decode_blocks import BLOCKS, ROWS, WEIGHTS

    rows, k = weight.shape
    if rows % ROWS or k % WEIGHTS or any(name not in BLOCKS for name in weight.formats):
        return weight
    stacks = []
    for name, planes in zip(weight.formats, weight.stacks, strict=True):
        # One layer at a time: unpacked codes take several times the room.
        tile = jax.jit(partial(jax.lax.map, BLOCKS[name].tile))
        if isinstance(plane := next(iter(planes.values())), jax.ShapeDtypeStruct):
            shape = (plane.shape[0], rows // ROWS, k // WEIGHTS * BLOCKS[name].words)
            stacks.append(jax.ShapeDtypeStruct(shape, "uint32"))
            continue
        stacks.append(jax.block_until_ready(tile(planes)))
        if not keep_rows:
            for plane in planes.values():
                if id(plane) not in keep:
                    plane.delete()
    return Tiled(
        stacks=tuple(stacks),
        formats=weight.formats,
        table=weight.table,
        shape=weight.shape,
        packed=weight if keep_rows else None,
    )
