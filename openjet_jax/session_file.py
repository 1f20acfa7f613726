"""Sessions on disk: written whole or not at all, and checked to the last bit before they are used.

A file is written beside its name, synced, and moved there: whoever is killed on the way leaves the
old one. It is readable by its owner alone, since it holds the conversation. Reading it checks every
byte in pieces of fixed size, and allocates nothing large before all are sound.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax
import jax.numpy as jnp
import numpy as np

from openjet_jax.loading import Model
from openjet_jax.session_format import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREAMBLE,
    VERSION,
    Header,
    Leaf,
    SessionFileError,
    leaves,
    state_specs,
)
from openjet_jax.session_memory import SessionMemory
from openjet_jax.state_checkpoints import StateCheckpoint
from pallas_kernels.attention import BLOCK

PIECE_BYTES = 1 << 20


def save_session(
    path: str | os.PathLike[str],
    model: Model,
    memory: SessionMemory,
    ids: list[int],
    answer_start: int,
) -> None:
    """Writes a session in place of the file of that name.

    Args:
      path: the file.
      model: the session's model.
      memory: its device side.
      ids: its history.
      answer_start: where its last answer begins.

    Raises:
      OSError: the system refuses, or another process is writing this file.
    """
    conversation, store = memory.conversation, memory.checkpoints
    header = Header(
        model=model.hash,
        kv_dtype=conversation.decode.kv_dtype,
        context=conversation.decode.context,
        history=len(ids),
        known=len(conversation.ids),
        answer_start=answer_start,
        checkpoints=tuple((facts.position, facts.kind) for facts in store.facts),
        sha256=(),
    )
    plan = leaves(model.config, header)
    # Digests have one length, so the header's size is known before the arrays are.
    header = dataclasses.replace(header, sha256=("0" * 64,) * len(plan))
    with _replacing(Path(path)) as file:
        digests = _write_arrays(file, len(header.pack()), plan, memory, ids)
        file.seek(0)
        file.write(dataclasses.replace(header, sha256=digests).pack())


def _write_arrays(
    file: IO[bytes], at: int, plan: list[Leaf], memory: SessionMemory, ids: list[int]
) -> tuple[str, ...]:
    """Writes the arrays from offset `at` on and returns their digests."""
    conversation, store = memory.conversation, memory.checkpoints
    digests = [hashlib.sha256() for _ in plan]
    offsets = _offsets(at, plan)
    kv = [i for i, leaf in enumerate(plan) if leaf.place == "kv"]

    def write(index: int, array: np.ndarray, offset: int) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
        digests[index].update(data)
        file.seek(offset)
        file.write(data)

    for index, tokens in enumerate((ids, conversation.ids)):
        write(index, np.asarray(tokens, np.int32), offsets[index])
    for block in range(-(-conversation.length // BLOCK)):
        rows = min(BLOCK, conversation.length - block * BLOCK)
        parts = jax.tree.leaves(conversation.read_block(block))
        for index, part in zip(kv, parts, strict=True):
            row_bytes = part[0].nbytes
            write(index, part[:rows], offsets[index] + block * BLOCK * row_bytes)
    index = kv[-1] + 1
    for checkpoint in (conversation.checkpoint(), *map(store.peek, store.positions)):
        for part in jax.tree.leaves(jax.device_get(checkpoint)):
            write(index, np.asarray(part).reshape(plan[index].shape), offsets[index])
            index += 1
    return tuple(digest.hexdigest() for digest in digests)


def _offsets(at: int, plan: list[Leaf]) -> list[int]:
    """Returns where each array begins, and where the last one ends."""
    return np.cumsum([at, *(leaf.nbytes for leaf in plan)]).tolist()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a new file that takes the place of `path` once its content is on the disk.

    The file beside it keeps its name from one saving to the next, so that a killed process leaves
    at most one, and a lock on it keeps two processes apart.
    """
    beside = path.with_name(f".{path.name}.partial")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(beside, flags, 0o600), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{path}: another process is saving to it") from None
        if not beside.exists() or not os.path.samestat(os.fstat(file.fileno()), beside.stat()):
            raise BlockingIOError(f"{path}: another process has just saved to it")
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class SavedSession:
    """An open file, checked as a whole.

    Attributes:
      header: its header.
      ids: the history.
    """

    def __init__(self, file: IO[bytes], model: Model):
        """Checks a file against a model.

        Raises:
          SessionFileError: with the reason.
        """
        self._file, self._model = file, model
        self.header, start = _checked_header(file, model)
        self._plan = leaves(model.config, self.header)
        self._at = _offsets(start, self._plan)
        size = os.fstat(file.fileno()).st_size
        if len(self.header.sha256) != len(self._plan) or size != self._at[-1]:
            raise SessionFileError(
                f"it has {size} bytes, not {self._at[-1]}; it was cut or damaged"
            )
        for index, digest in enumerate(self.header.sha256):
            if self._digest(index) != digest:
                leaf = self._plan[index]
                raise SessionFileError(f"its checksum of {leaf.place}{leaf.name} differs")
        self.ids, self._known = self._tokens(0), self._tokens(1)

    def check_context(self, context: int) -> None:
        """Raises SessionFileError unless the session fits a context."""
        tokens = max(self.header.history, self.header.known)
        if tokens > context:
            raise SessionFileError(
                f"{self._file.name}: {tokens} tokens do not fit {context=}; ask for a larger one"
            )

    def load(self, memory: SessionMemory) -> None:
        """Fills the memory of a new session."""
        conversation = memory.conversation
        block_specs, checkpoint_specs = state_specs(self._model.config, self.header.kv_dtype)
        kv = [index for index, leaf in enumerate(self._plan) if leaf.place == "kv"]
        for block in range(-(-self.header.length // BLOCK)):
            start, end = block * BLOCK, min((block + 1) * BLOCK, self.header.length)
            parts = [self._rows(index, start, end) for index in kv]
            conversation.write_block(
                jax.tree.unflatten(jax.tree.structure(block_specs), parts), block
            )
        tree = jax.tree.structure(checkpoint_specs)
        checkpoints: list[StateCheckpoint] = [
            jax.tree.unflatten(tree, [self._array(at + i) for i in range(tree.num_leaves)])
            for at in range(kv[-1] + 1, len(self._plan), tree.num_leaves)
        ]
        if self._known:
            conversation.rewind(checkpoints[0], self._known)
            conversation.hold_tokens()
        facts = zip(self.header.checkpoints, checkpoints[1:], strict=True)
        memory.remember((position, kind, checkpoint) for (position, kind), checkpoint in facts)

    def _digest(self, index: int) -> str:
        digest, left = hashlib.sha256(), self._plan[index].nbytes
        self._file.seek(self._at[index])
        while left:
            piece = self._file.read(min(left, PIECE_BYTES))
            if not piece:
                raise SessionFileError("it became shorter while it was read")
            digest.update(piece)
            left -= len(piece)
        return digest.hexdigest()

    def _array(self, index: int) -> np.ndarray:
        leaf = self._plan[index]
        self._file.seek(self._at[index])
        data = self._file.read(leaf.nbytes)
        return np.frombuffer(data, jnp.dtype(leaf.dtype)).reshape(leaf.shape)

    def _rows(self, index: int, start: int, end: int) -> np.ndarray:
        """Returns `BLOCK` positions of a cache, zeros behind the last one stored."""
        leaf = self._plan[index]
        dtype, row = jnp.dtype(leaf.dtype), leaf.shape[1:]
        row_bytes = int(np.prod(row)) * dtype.itemsize
        self._file.seek(self._at[index] + start * row_bytes)
        rows = np.zeros((BLOCK, *row), dtype)
        data = self._file.read((end - start) * row_bytes)
        rows[: end - start] = np.frombuffer(data, dtype).reshape(-1, *row)
        return rows

    def _tokens(self, index: int) -> list[int]:
        tokens = self._array(index)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._model.config.vocab:
            raise SessionFileError(f"a token id is outside 0..{self._model.config.vocab - 1}")
        return tokens.tolist()


def _checked_header(file: IO[bytes], model: Model) -> tuple[Header, int]:
    """Returns the header and where the arrays begin."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise SessionFileError("it is not a regular file")
    preamble = file.read(PREAMBLE.size)
    if len(preamble) < PREAMBLE.size or not preamble.startswith(MAGIC):
        raise SessionFileError("it is not a session's file")
    _, version, size, digest = PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise SessionFileError(f"it has version {version}; this program reads {VERSION}")
    if size > MAX_HEADER_BYTES or PREAMBLE.size + size > status.st_size:
        raise SessionFileError(f"its header of {size} bytes is too long; it was cut or damaged")
    content = file.read(size)
    if hashlib.sha256(content).digest() != digest:
        raise SessionFileError("the checksum of its header differs; it is damaged")
    header = Header.unpack(content)
    if header.model != model.hash:
        raise SessionFileError(
            f"it was saved from the model {header.model:.12}, not from {model.directory.name} "
            f"({model.hash:.12}); load that one"
        )
    return header, PREAMBLE.size + size


@contextlib.contextmanager
def opened_session(path: str | os.PathLike[str], model: Model) -> Iterator[SavedSession]:
    """Yields a checked file, open.

    Raises:
      SessionFileError: naming the file and the reason.
      OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        try:
            saved = SavedSession(file, model)
        except SessionFileError as error:
            raise SessionFileError(f"{os.fspath(path)}: {error}") from None
        yield saved
