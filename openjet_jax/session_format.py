"""What a session's file holds: its header, and the arrays that follow from it.

    8 bytes    magic
    4 + 4      version and length of the header, little-endian
    32         SHA-256 of the header
    header     JSON: the model's hash, the cache's format, counts, and a SHA-256 for each array
    arrays     in the order of `leaves`, without gaps, to the end of the file

Which arrays there are, and of what shape, follows from the model and a few counts. Keys and values
are stored position by position, cut to the length of the text.
"""

import dataclasses
import functools
import hashlib
import json
import math
import struct
from typing import Any, Self

import jax
import jax.numpy as jnp

from openjet_jax.architectures import initial_state
from openjet_jax.checkpoint_store import KINDS, Kind
from openjet_jax.config import KV_DTYPES, DecodeConfig, ModelConfig
from openjet_jax.state_checkpoints import read_block, take_checkpoint

MAGIC, VERSION = b"OJETSESS", 1

PREAMBLE = struct.Struct("<8sII32s")

MAX_HEADER_BYTES = 4 << 20
"""Longest header: about 5,000 checkpoints."""


class SessionFileError(ValueError):
    """A file that is no sound session of this model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of itself.

    Attributes:
      model: hash of the model's checkpoint.
      kv_dtype: format of the cache.
      context: most positions of the session.
      history: tokens of the history.
      known: tokens that the device holds, the newest included.
      answer_start: where the last answer begins in the history.
      checkpoints: (position, kind) of each, ascending.
      sha256: of each array.
    """

    model: str
    kv_dtype: str
    context: int
    history: int
    known: int
    answer_start: int
    checkpoints: tuple[tuple[int, Kind], ...]
    sha256: tuple[str, ...]

    def __post_init__(self):
        """Raises SessionFileError naming the first field that no file could hold."""
        for name in ("context", "history", "known", "answer_start"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**31:
                raise SessionFileError(f"{name}={value!r:.40} is not a count")
        if max(self.history, self.known) > self.context or self.answer_start > self.history:
            raise SessionFileError("its counts contradict each other")
        if self.kv_dtype not in KV_DTYPES:
            raise SessionFileError(f"kv_dtype={self.kv_dtype!r:.40} is unknown")
        if not isinstance(self.model, str):
            raise SessionFileError(f"model={self.model!r:.40} is not a hash")
        before = 0
        for position, kind in self.checkpoints:
            if type(position) is not int or not before < position <= self.length:
                raise SessionFileError(f"a checkpoint at {position!r:.20} is out of place")
            if kind not in KINDS:
                raise SessionFileError(f"a checkpoint of kind {kind!r:.20} is unknown")
            before = position

    @property
    def length(self) -> int:
        """Positions in the caches."""
        return max(self.known - 1, 0)

    def pack(self) -> bytes:
        """Returns the file's first bytes, up to the arrays."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
        digest = hashlib.sha256(content).digest()
        return PREAMBLE.pack(MAGIC, VERSION, len(content), digest) + content

    @classmethod
    def unpack(cls, content: bytes) -> Self:
        """Returns the header that JSON bytes hold.

        Raises:
          SessionFileError: they hold none.
        """
        try:
            fields = json.loads(content)
            fields["checkpoints"] = tuple((p, k) for p, k in fields["checkpoints"])
            fields["sha256"] = tuple(fields["sha256"])
            return cls(**fields)
        except SessionFileError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SessionFileError(f"its header cannot be read: {error!r:.200}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the file.

    Attributes:
      place: "ids", "kv", "state", or the index of a checkpoint.
      name: which one there.
      dtype: its type's name.
      shape: its shape.
    """

    place: str | int
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@functools.cache
def state_specs(config: ModelConfig, kv_dtype: str) -> tuple[Any, Any]:
    """Returns the shapes of a block of the caches and of a checkpoint."""
    decode = DecodeConfig(context=1, kv_dtype=kv_dtype)
    state = jax.eval_shape(lambda: initial_state(config, decode))
    block = jax.eval_shape(read_block, state, jax.ShapeDtypeStruct((), jnp.int32))
    return block, jax.eval_shape(take_checkpoint, state)


def leaves(config: ModelConfig, header: Header) -> list[Leaf]:
    """Returns the arrays of a file, in order."""
    block, checkpoint = state_specs(config, header.kv_dtype)
    found = [
        Leaf(place="ids", name=name, dtype="int32", shape=(getattr(header, name),))
        for name in ("history", "known")
    ]
    for name, leaf in _named(block):
        shape = (header.length, *leaf.shape[1:])
        found.append(Leaf(place="kv", name=name, dtype=str(leaf.dtype), shape=shape))
    for place in ("state", *range(len(header.checkpoints))):
        for name, leaf in _named(checkpoint):
            found.append(Leaf(place=place, name=name, dtype=str(leaf.dtype), shape=leaf.shape))
    return found


def _named(tree: object) -> list[tuple[str, Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
