"""Weights on their way into the kernels' order: layer by layer, while later ones are still read.

`tiling` says which projections make up which matrix; here is how their rows get there. The words of
a layer, or of some rows of a large one, are made and written to their place by one program, so that
memory holds the finished stack and one piece more. Nothing but shapes is needed to tell what will
be read and which programs will run: `Planning` notes both, so that reading goes ahead in order and
programs are compiled side by side meanwhile.
"""

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed import Planes

PIECE_VALUES = 2**27
"""Weights that are tiled at once: unpacked codes take several times the room."""


class Unread:
    """A leaf of `Weights` that no device holds yet."""

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array to be."""
        raise NotImplementedError

    def layer(self, slot: int | None) -> Self:
        """Returns one layer of it, or all of it with None."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows that are tiled at once.

    Attributes:
      format: name of their packed format.
      rows: how many of each projection that is joined.
      paired: whether the rows of the two alternate by eights.
    """

    format: str
    rows: tuple[int, ...]
    paired: bool


class Placing:
    """Makes stacks of words from arrays that are on the device, by programs as they are needed."""

    def take(self, leaf: Any, slot: int | None = None) -> Any:
        """Returns a leaf's array, all of it or [1, ...], one layer.

        Args:
          leaf: what has not been read.
          slot: the layer.
        """
        raise TypeError(f"{leaf} is to be read, and nobody reads")

    def new(self, spec: jax.ShapeDtypeStruct) -> Any:
        """Returns a stack to be filled."""
        return jnp.zeros(spec.shape, spec.dtype)

    def place(self, stack: Any, parts: Sequence[Planes], at: Sequence[int], piece: Piece) -> Any:
        """Returns the stack, consumed, with the words of some rows in their place.

        Args:
          stack: uint32 [layers, units, words].
          parts: planes [layers, rows, per row] of each projection that is joined.
          at: which layer of the planes and which rows, from the first on; layer and unit of the
            stack.
          piece: what is tiled.
        """
        return _placed(stack, tuple(parts), np.asarray(at, np.int32), piece=piece)


def _rows_in_order(paired: bool, *planes: jax.Array) -> jax.Array:
    """Returns rows one below the other, or alternating by eights."""
    if not paired:
        return jnp.concatenate(planes)
    rows, width = planes[0].shape
    eights = [plane.reshape(rows // 8, 8, width) for plane in planes]
    return jnp.stack(eights, axis=1).reshape(2 * rows, width)


@partial(jax.jit, static_argnames="piece", donate_argnums=0)
def _placed(stack: jax.Array, parts: tuple[Planes, ...], at: jax.Array, *, piece: Piece):
    """Returns what `Placing.place` does."""
    from pallas_kernels.decode_blocks import BLOCKS

    slot, row, layer, unit = at

    def rows_of(plane: jax.Array, count: int) -> jax.Array:
        return jax.lax.dynamic_slice(plane, (slot, row, 0), (1, count, plane.shape[2]))[0]

    some = [
        {name: rows_of(plane, count) for name, plane in planes.items()}
        for planes, count in zip(parts, piece.rows, strict=True)
    ]
    planes = jax.tree.map(partial(_rows_in_order, piece.paired), *some)
    words = BLOCKS[piece.format].tile(planes)
    return jax.lax.dynamic_update_slice(stack, words[None], (layer, unit, 0))


class Planning(Placing):
    """Places nothing: notes what will be read, in order, and which programs will run.

    Attributes:
      wanted: leaves, and the layer or None.
      programs: arguments of `_placed`, once each, and shapes of new stacks.
    """

    def __init__(self):
        """Starts with nothing."""
        self.wanted: list[tuple[Any, int | None]] = []
        self.programs: dict[Any, Any] = {}

    def take(self, leaf: Any, slot: int | None = None) -> Any:
        """Returns the array's shape; see `Placing`."""
        self.wanted.append((leaf, slot))
        return leaf.layer(slot).spec

    def new(self, spec: jax.ShapeDtypeStruct) -> Any:
        """Returns the shape; see `Placing`."""
        self.programs[_key(spec)] = lambda: jax.jit(partial(jnp.zeros, *_key(spec))).lower()
        return spec

    def place(self, stack: Any, parts: Sequence[Planes], at: Sequence[int], piece: Piece) -> Any:
        """Returns the stack's shape; see `Placing`."""
        given = stack, tuple(parts), jax.ShapeDtypeStruct((len(at),), jnp.int32)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        key = _program_key(stack, parts, piece)
        self.programs[key] = lambda: _placed.lower(*shapes, piece=piece)
        return stack


class Sending(Placing):
    """Sends what is read to the device, and runs programs that were compiled meanwhile.

    Args:
      reader: has `take` of leaves in the order of a plan.
      send: brings an array to the device.
      plan: of the same weights.
    """

    def __init__(self, reader: Any, send: Any, plan: Planning):
        """Starts compiling, for JAX's default device as it is here."""
        self._reader, self._send = reader, send
        device = jax.config.jax_default_device

        def compiled(lower: Any) -> Any:
            # Threads have a default of their own.
            with jax.default_device(device):
                return lower().compile()

        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile")
        self._programs: dict[Any, Future] = {
            key: self._pool.submit(compiled, lower) for key, lower in plan.programs.items()
        }

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops compiling."""
        self._pool.shutdown(cancel_futures=True)

    def take(self, leaf: Any, slot: int | None = None) -> Any:
        """Returns the array on the device; see `Placing`."""
        return self._send(self._reader.take(leaf, slot))

    def new(self, spec: jax.ShapeDtypeStruct) -> Any:
        """Returns a stack of zeros; see `Placing`."""
        return self._programs[_key(spec)].result()()

    def place(self, stack: Any, parts: Sequence[Planes], at: Sequence[int], piece: Piece) -> Any:
        """Returns the stack when its new words are there; see `Placing`."""
        program = self._programs[_program_key(stack, parts, piece)].result()
        placed = program(stack, tuple(parts), np.asarray(at, np.int32))
        # What was read is freed before more is sent.
        return jax.block_until_ready(placed)


def _key(spec: Any) -> tuple[Any, Any]:
    return spec.shape, spec.dtype


def _program_key(stack: Any, parts: Sequence[Planes], piece: Piece) -> Any:
    shapes = tuple(_key(plane) for planes in parts for plane in planes.values())
    return _key(stack), shapes, piece
