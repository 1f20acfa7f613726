"""From packed rows to the order in which the decode kernels read: done once, at loading.

The kernels are for sm_90 GPUs. A projection takes part if every format its layers use has a block
and its sizes are whole blocks; others stay packed and run through the reference.

Neighbouring projections of the same activations become one matrix, so that a layer takes few
products: their rows stand one below the other, or, for gate and up, alternate by eights. That needs
equal formats in every layer; where a file mixes them, they stay apart.
"""

import dataclasses
import itertools
import typing
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from openjet_jax.qwen4exp_weights import ExpertWeights
from openjet_jax.weights import (
    AttentionWeights,
    DeltaNetWeights,
    FeedForwardWeights,
    Packed,
    Tiled,
    Weights,
    Within,
)
from pallas_kernels.packed import Planes

BACKENDS = ("auto", "reference", "mosaic")

_STACKED: dict[type, tuple[str, ...]] = {
    AttentionWeights: ("q", "k", "v"),
    DeltaNetWeights: ("qkv", "gate", "alpha", "beta"),
}
"""Projections that meet the same activations, in the order in which `project_each` takes them."""

_PAIRED: dict[type, tuple[str, str]] = {
    FeedForwardWeights: ("gate", "up"),
    ExpertWeights: ("shared_gate", "shared_up"),
}
"""Gates, and what they are multiplied with."""


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

    The packed arrays are freed one by one, so that memory peaks at one joined projection more than
    the model. The embedding stays packed: its rows are looked up.

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
        node = dataclasses.replace(node, **_joined(node))
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
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_words import ROWS, WEIGHTS

    if not _can_be_tiled(weight):
        return weight
    (rows, k), stacks = weight.shape, []
    for name, planes in zip(weight.formats, weight.stacks, strict=True):
        # One layer at a time: unpacked codes take several times the room.
        tile = jax.jit(partial(jax.lax.map, BLOCKS[name].tile))
        if isinstance(plane := next(iter(planes.values())), jax.ShapeDtypeStruct):
            shape = (plane.shape[0], rows // ROWS, k // WEIGHTS * BLOCKS[name].words)
            stacks.append(jax.ShapeDtypeStruct(shape, "uint32"))
            continue
        stacks.append(jax.block_until_ready(tile(planes)))
        if not keep_rows:
            _free(planes, keep)
    return Tiled(
        stacks=tuple(stacks),
        formats=weight.formats,
        table=weight.table,
        shape=weight.shape,
        parts=weight.parts,
        packed=weight if keep_rows else None,
    )


def _can_be_tiled(weight: Packed) -> bool:
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_words import ROWS, WEIGHTS

    rows, k = weight.shape
    return not rows % ROWS and not k % WEIGHTS and all(name in BLOCKS for name in weight.formats)


def _free(planes: Planes, keep: set[int] | frozenset[int] = frozenset()) -> None:
    for plane in planes.values():
        if id(plane) not in keep and isinstance(plane, jax.Array):
            plane.delete()


def _joined(node: Any) -> dict[str, Any]:
    """Returns the fields of a module that become one matrix, and those that are within it."""
    changed: dict[str, Any] = {}
    if names := _PAIRED.get(type(node)):
        gate, up = (getattr(node, name) for name in names)
        if _alike(gate, up) and gate.shape == up.shape and _can_be_tiled(gate):
            pair = tiled(_join([gate, up], paired=True), keep_rows=False)
            changed = {names[0]: dataclasses.replace(pair, paired=True), names[1]: Within()}
    names = _STACKED.get(type(node), ())
    while names:
        first, *others = (getattr(node, name) for name in names)
        run = [first, *itertools.takewhile(partial(_alike, first), others)]
        if len(run) > 1:
            changed |= {name: Within() for name in names[: len(run)]}
            changed[names[0]] = _join(run, paired=False)
        names = names[len(run) :]
    return changed


def _alike(a: Packed, b: Packed) -> bool:
    """Returns whether two projections can be parts of one matrix."""
    return (a.formats, a.table, a.shape[1]) == (b.formats, b.table, b.shape[1]) and (
        _can_be_tiled(a) == _can_be_tiled(b)
    )


def _join(projections: list[Packed], *, paired: bool) -> Packed:
    """Returns one projection: rows one below the other, or alternating by eights; frees the parts.

    Args:
      projections: of equal formats.
      paired: whether the rows of the two alternate.
    """

    def join(*planes: jax.Array) -> jax.Array:
        if not paired:
            return jnp.concatenate(planes, axis=1)
        layers, rows, width = planes[0].shape
        eights = [plane.reshape(layers, rows // 8, 8, width) for plane in planes]
        return jnp.stack(eights, axis=2).reshape(layers, 2 * rows, width)

    stacks = []
    for parts in zip(*(projection.stacks for projection in projections), strict=True):
        run = jax.jit(partial(jax.tree.map, join))
        if isinstance(next(iter(parts[0].values())), jax.ShapeDtypeStruct):
            run = partial(jax.eval_shape, run)
        stacks.append(jax.block_until_ready(run(*parts)))
        for planes in parts:
            _free(planes)
    rows = tuple(projection.shape[0] for projection in projections)
    shape = (sum(rows), projections[0].shape[1])
    return dataclasses.replace(projections[0], stacks=tuple(stacks), shape=shape, parts=rows)
