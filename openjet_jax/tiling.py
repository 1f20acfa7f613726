"""Which projections become which matrix in the kernels' order: done once, at loading (`placing`).

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

from openjet_jax.placing import PIECE_VALUES, Piece, Placing, Planning, Unread
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

_HERE = Placing()
"""For arrays that are on the device."""

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


def tiled_weights(weights: Weights, placing: Placing | None = None) -> Weights:
    """Returns the weights with every projection that the kernels can read in their order.

    Attention and DeltaNet layers are marked: a cycle's rows go through their kernels.

    Packed arrays are freed one by one, so that memory peaks at one projection more than the model;
    those that are read meanwhile (`placing.Sending`) take no more than a layer. The embedding stays
    packed: its rows are looked up.

    Args:
      weights: on the device, and consumed; or shapes alone; or to be read, all but the heads.
      placing: how words get to their place; by default whatever suits arrays, or shapes.
    """
    if placing is None:
        shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(weights))
        placing = Planning() if shapes else _HERE
    mtp = weights.mtp
    heads = [weights.head, mtp.head if mtp is not None else None]
    slots = mtp is not None and mtp.draft is not None and not mtp.draft.whole
    looked_up = heads if slots else []
    shared = {id(plane) for plane in jax.tree.leaves(weights.embedding)}

    def visit(node: Any) -> Any:
        if isinstance(node, Packed):
            rows = any(node is head for head in looked_up)
            return tiled(node, keep_rows=rows, keep=shared, placing=placing)
        node = dataclasses.replace(node, **_joined(node, placing))
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
    return _read(dataclasses.replace(changed, **embeddings), placing)


def tiled(
    weight: Packed,
    *,
    keep_rows: bool,
    keep: set[int] | frozenset[int] = frozenset(),
    placing: Placing = _HERE,
) -> Packed | Tiled:
    """Returns one projection in the kernels' order, or as it is where they cannot read it.

    Args:
      weight: the packed projection.
      keep_rows: whether rows of it will be looked up; else the packed arrays are freed.
      keep: `id` of arrays that belong to something else too and are not freed.
      placing: see `tiled_weights`.
    """
    if not _can_be_tiled(weight):
        return weight
    if keep_rows:
        weight = _read(weight, placing)
    one = _one_matrix([weight], False, set(keep) if not keep_rows else None, placing)
    return dataclasses.replace(one, parts=weight.parts, packed=weight if keep_rows else None)


def _read(tree: Any, placing: Placing) -> Any:
    """Returns a module with the arrays in it that are yet to be read."""
    return jax.tree.map(lambda x: placing.take(x) if isinstance(x, Unread) else x, tree)


def _can_be_tiled(weight: Packed) -> bool:
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_words import ROWS, WEIGHTS

    rows, k = weight.shape
    return not rows % ROWS and not k % WEIGHTS and all(name in BLOCKS for name in weight.formats)


def _one_matrix(
    projections: list[Packed], paired: bool, keep: set[int] | None, placing: Placing
) -> Tiled:
    """Returns projections of equal formats as one, tiled.

    Args:
      projections: which the kernels can read, alone or together.
      paired: whether the rows of the two alternate.
      keep: `id` of arrays that are not freed; None frees none.
      placing: see `tiled_weights`.
    """
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_words import ROWS, WEIGHTS

    first, rows = projections[0], tuple(projection.shape[0] for projection in projections)
    k, stacks = first.shape[1], []
    for index, name in enumerate(first.formats):
        parts = [projection.stacks[index] for projection in projections]
        num_layers = _spec(next(iter(parts[0].values()))).shape[0]
        shape = num_layers, sum(rows) // ROWS, k // WEIGHTS * BLOCKS[name].words
        stack = placing.new(jax.ShapeDtypeStruct(shape, jnp.dtype("uint32")))
        step = _rows_at_once(rows, k, paired)
        taken = rows if step is None else (step,) * len(rows)
        for layer in range(num_layers):
            planes, slot = _layer(parts, layer, placing)
            for row in range(0, max(rows), max(taken)):
                at = slot, row, layer, row * len(rows) // ROWS
                piece = Piece(format=name, rows=taken, paired=paired)
                stack = placing.place(stack, planes, at, piece)
        stacks.append(stack)
        for planes in parts if keep is not None else []:
            _free(planes, keep or set())
    return Tiled(
        stacks=tuple(stacks),
        formats=first.formats,
        table=first.table,
        shape=(sum(rows), k),
        parts=rows if len(rows) > 1 else (),
        paired=paired,
    )


def _layer(parts: list[Planes], layer: int, placing: Placing) -> tuple[list[Planes], int]:
    """Returns planes that hold a layer, and its place in them: what is read is one layer alone."""
    if not any(isinstance(plane, Unread) for planes in parts for plane in planes.values()):
        return parts, layer
    return [
        {name: placing.take(plane, layer) for name, plane in planes.items()} for planes in parts
    ], 0


def _rows_at_once(rows: tuple[int, ...], k: int, paired: bool) -> int | None:
    """Returns how many rows of each projection are tiled at once; None for all."""
    from pallas_kernels.decode_words import ROWS

    if sum(rows) * k <= PIECE_VALUES or (len(rows) > 1 and not paired):
        return None
    unit, height = ROWS // len(rows), max(rows)
    most = PIECE_VALUES // (len(rows) * k)
    return max((n for n in range(unit, most + 1, unit) if height % n == 0), default=unit)


def _spec(plane: Any) -> Any:
    return plane.spec if isinstance(plane, Unread) else plane


def _free(planes: Planes, keep: set[int] | frozenset[int] = frozenset()) -> None:
    for plane in planes.values():
        if id(plane) not in keep and isinstance(plane, jax.Array):
            plane.delete()


def _joined(node: Any, placing: Placing = _HERE) -> dict[str, Any]:
    """Returns the fields of a module that become one matrix, and those that are within it."""
    changed: dict[str, Any] = {}
    if names := _PAIRED.get(type(node)):
        gate, up = (getattr(node, name) for name in names)
        if _alike(gate, up) and gate.shape == up.shape and _can_be_tiled(gate):
            changed = {names[0]: _one_matrix([gate, up], True, set(), placing), names[1]: Within()}
    names = _STACKED.get(type(node), ())
    while names:
        first, *others = (getattr(node, name) for name in names)
        run = [first, *itertools.takewhile(partial(_alike, first), others)]
        if len(run) > 1:
            changed |= {name: Within() for name in names[: len(run)]}
            changed[names[0]] = _join(run, placing)
        names = names[len(run) :]
    return changed


def _alike(a: Packed, b: Packed) -> bool:
    """Returns whether two projections can be parts of one matrix."""
    return (a.formats, a.table, a.shape[1]) == (b.formats, b.table, b.shape[1]) and (
        _can_be_tiled(a) == _can_be_tiled(b)
    )


def _join(projections: list[Packed], placing: Placing) -> Packed | Tiled:
    """Returns one projection: rows one below the other; frees the parts."""
    rows = tuple(projection.shape[0] for projection in projections)
    shape = (sum(rows), projections[0].shape[1])
    whole = dataclasses.replace(projections[0], shape=shape, parts=rows)
    if _can_be_tiled(whole):
        return _one_matrix(projections, False, set(), placing)
    projections = [_read(projection, placing) for projection in projections]
    stacks = []
    for parts in zip(*(projection.stacks for projection in projections), strict=True):
        join = jax.jit(partial(jax.tree.map, lambda *planes: jnp.concatenate(planes, axis=1)))
        if isinstance(next(iter(parts[0].values())), jax.ShapeDtypeStruct):
            join = partial(jax.eval_shape, join)
        stacks.append(jax.block_until_ready(join(*parts)))
        for planes in parts:
            _free(planes)
    return dataclasses.replace(whole, stacks=tuple(stacks))
