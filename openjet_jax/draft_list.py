"""Which tokens a model drafts over: the default rule, counted text, and the file that keeps a list.

The list stands in a checkpoint as `draft_vocabulary.json`, tied to the checkpoint's hash. It is
replaced as a whole or not at all. Knows no weights; `draft_vocabulary` makes heads of lists.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from openjet_jax.checkpoint import CheckpointError
from openjet_jax.draft_vocabulary import HEAD_FORMATS
from openjet_jax.tokenizer import MODEL_FILE, Tokenizer

type DraftVocab = str | int | Sequence[int] | np.ndarray | None
"""What a user may ask for: "full", "default", a size, ids, or None for what fits the model."""

DEFAULT_SIZE = 32_768
"""Rows of the default list, and the largest vocabulary that drafts over all of it by default."""

FILE = "draft_vocabulary.json"
KIND = "openjet-jax draft vocabulary"
VERSION = 1

_PIECE_CHARS = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftList:
    """Tokens that drafts are made of, beside those that a sequence brings itself.

    Attributes:
      ids: distinct token ids, ascending; None for the whole vocabulary.
      head: how the draft head stores its rows, one of `HEAD_FORMATS`.
      counted: tokens of the text that the list was counted on, 0 if it was not.
      covered: how many of those are in the list.
    """

    ids: Int[np.ndarray, " rows"] | None
    head: str = "same"
    counted: int = 0
    covered: int = 0

    def __post_init__(self):
        """Raises ValueError for an unknown head."""
        if self.head not in HEAD_FORMATS:
            raise ValueError(
                f"draft_head={self.head!r} is unknown; use one of {', '.join(HEAD_FORMATS)}"
            )

    def head_rows(self, vocab: int) -> Int[np.ndarray, " rows"] | None:
        """Returns the ids of the draft head's rows, or None where the full head itself drafts."""
        if self.ids is None and self.head != "same":
            return np.arange(vocab, dtype=np.int32)
        return self.ids

    def __str__(self) -> str:
        """Returns a few words for people."""
        rows = "the full vocabulary" if self.ids is None else f"{len(self.ids):,} listed tokens"
        share = f", {self.covered / self.counted:.2%} of the counted text" if self.counted else ""
        return f"{rows}{share}{' through a 4-bit head' * (self.head == 'q4')}"


def frequent_ids(
    counts: Int[np.ndarray, " vocab_used"], added: Collection[int], size: int
) -> Int[np.ndarray, " size"]:
    """Returns the ids of a list, ascending: added tokens, then the most counted, the lowest first.

    Without counts that is the default list. A byte-level BPE numbers its tokens in the order its
    merges were learnt, most frequent first, so low ids are the frequent tokens of the tokenizer's
    own training text. Control and user-defined tokens open and close every turn.

    Args:
      counts: how often each token was seen.
      added: ids of control and user-defined tokens.
      size: tokens in the list.

    Raises:
      ValueError: the size is not in 1..vocab_used.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"draft vocabulary: {size=} must be in 1..{len(counts)}")
    first = np.isin(np.arange(len(counts)), list(added))
    order = np.lexsort((-counts, ~first))
    return np.sort(order[:size]).astype(np.int32)


def added_ids(tokenizer: Tokenizer) -> set[int]:
    """Returns the ids of control and user-defined tokens."""
    return {*tokenizer.control_tokens.values(), *tokenizer.user_defined_tokens.values()}


def count_files(tokenizer: Tokenizer, paths: Iterable[Path]) -> Int[np.ndarray, " vocab_used"]:
    """Returns how often each token stands in some files.

    Args:
      tokenizer: of the model.
      paths: .npy files of token ids, .json files that `generate --json` printed (their `token_ids`
        count), and UTF-8 text of any other name.

    Raises:
      ValueError: a file holds no ids of this vocabulary, or nothing was counted.
      OSError: a file cannot be read.
    """
    counts = np.zeros(tokenizer.vocab_used, np.int64)
    for path in paths:
        for ids in _pieces(tokenizer, path):
            if ids.size and not (0 <= ids.min() and ids.max() < len(counts)):
                raise ValueError(f"{path}: token ids must be in 0..{len(counts) - 1}")
            counts += np.bincount(ids, minlength=len(counts))
    if not counts.any():
        raise ValueError("nothing was counted: the files are empty")
    return counts


def _pieces(tokenizer: Tokenizer, path: Path) -> Iterable[np.ndarray]:
    """Yields the ids of a file: text some lines at a time, control tokens in it read as such."""
    if path.suffix == ".npy":
        try:
            ids = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a .npy file of token ids ({error})") from None
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{path}: token ids must be integers, not {ids.dtype}")
        yield ids.reshape(-1).astype(np.int64)
        return
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if isinstance(content, dict) and "token_ids" in content:
            yield np.asarray(content["token_ids"], np.int64)
            return
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        while lines := file.readlines(_PIECE_CHARS):
            yield np.asarray(tokenizer.encode("".join(lines), special=True), np.int64)


def counted_list(
    tokenizer: Tokenizer, paths: Iterable[Path], size: int = DEFAULT_SIZE, head: str = "same"
) -> DraftList:
    """Returns the list of the tokens that are most frequent in some files; see `count_files`.

    Args:
      tokenizer: of the model.
      paths: what is counted.
      size: tokens in the list; no more than the vocabulary has are taken.
      head: how the draft head stores its rows.

    Raises:
      ValueError, OSError: as `count_files` and `frequent_ids`.
    """
    counts = count_files(tokenizer, paths)
    ids = frequent_ids(counts, added_ids(tokenizer), min(size, len(counts)))
    return DraftList(ids=ids, head=head, counted=int(counts.sum()), covered=int(counts[ids].sum()))


def chosen_list(
    directory: Path,
    checkpoint: str,
    tokenizer: Tokenizer,
    vocab: DraftVocab = None,
    head: str | None = None,
) -> DraftList:
    """Returns the list that a model drafts over.

    Args:
      directory: of the checkpoint.
      checkpoint: its hash.
      tokenizer: of the model.
      vocab: "full", "default" (the default list), the size of a default list, or ids; None takes
        the checkpoint's own list or, where there is none, the full vocabulary up to `DEFAULT_SIZE`
        tokens and the default list above.
      head: one of `HEAD_FORMATS`; None takes that of the checkpoint's own list if that is used,
        else "same".

    Raises:
      ValueError: as `read_list`, or what is asked for does not exist.
    """
    used = tokenizer.vocab_used
    if vocab is None:
        own = read_list(directory, checkpoint, used)
        if own is not None:
            return own if head is None else dataclasses.replace(own, head=head)
        vocab = "full" if used <= DEFAULT_SIZE else "default"
    if isinstance(vocab, str):
        if vocab not in ("full", "default"):
            raise ValueError(f"draft_vocab={vocab!r}: use 'full', 'default', a size, or token ids")
        ids = None
        if vocab == "default":
            ids = frequent_ids(np.zeros(used, int), added_ids(tokenizer), min(DEFAULT_SIZE, used))
    elif isinstance(vocab, int):
        ids = frequent_ids(np.zeros(used, int), added_ids(tokenizer), vocab)
    else:
        ids = _checked(vocab, used, "draft_vocab")
    return DraftList(ids=ids, head="same" if head is None else head)


def _checked(ids: object, vocab_used: int, name: str) -> Int[np.ndarray, " rows"]:
    """Returns ids ascending; raises ValueError unless they are distinct and in the vocabulary."""
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name}: a list is one row of at least one token id, not {array.dtype}"
            f"{list(array.shape)}"
        )
    array = np.sort(array.astype(np.int64))
    if array[0] < 0 or array[-1] >= vocab_used:
        raise ValueError(f"{name}: token ids must be in 0..{vocab_used - 1}")
    repeated = array[1:][array[1:] == array[:-1]]
    if repeated.size:
        raise ValueError(f"{name}: token {repeated[0]} is listed twice; list each token once")
    return array.astype(np.int32)


def read_list(directory: Path, checkpoint: str | None, vocab_used: int) -> DraftList | None:
    """Returns the list that stands in a checkpoint, or None.

    Args:
      directory: of the checkpoint.
      checkpoint: its hash; None takes a list of any.
      vocab_used: the list's ids are below it.

    Raises:
      CheckpointError: it is of another checkpoint or version, or damaged.
    """
    path = directory / FILE
    way_out = "write it again with `openjet-jax draft-vocab`, or remove it with its --reset"
    try:
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if content.pop("kind") != KIND or content.pop("version") != VERSION:
            raise ValueError(f"it is not a {KIND!r} of version {VERSION}")
        if content.pop("checkpoint") != checkpoint and checkpoint is not None:
            raise ValueError("it was made for another checkpoint")
        content["ids"] = _checked(content["ids"], vocab_used, "ids")
        return DraftList(**content)
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; {way_out}") from error


def write_list(directory: Path, checkpoint: str, draft: DraftList) -> Path:
    """Writes a list into a checkpoint in place of the one before, and returns its path.

    Raises:
      OSError: the system refuses; the list before is untouched.
    """
    assert draft.ids is not None
    content = {"kind": KIND, "version": VERSION, "checkpoint": checkpoint}
    content |= {"head": draft.head, "counted": draft.counted, "covered": draft.covered}
    head = json.dumps(content, indent=1)[:-2]
    path = directory / FILE
    partial = directory / f".{FILE}.{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(f'{head},\n "ids": {json.dumps(draft.ids.tolist())}\n}}\n')
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def carry_list(old: Path, new: Path, checkpoint: str, vocab_used: int) -> str | None:
    """Copies the list of a checkpoint into the one that replaces it, if both have the same tokens.

    Args:
      old: directory of the checkpoint to be replaced, in whatever state.
      new: directory of the other one, its tokenizer written.
      checkpoint: hash of the new one.
      vocab_used: of its tokenizer.

    Returns:
      What became of the list, for people; None where there is none.
    """
    if not (old / FILE).exists():
        return None
    try:
        if (old / MODEL_FILE).read_bytes() != (new / MODEL_FILE).read_bytes():
            raise ValueError("the tokenizer is another one")
        draft = read_list(old, None, vocab_used)
    except (OSError, ValueError) as error:
        return (
            f"the draft list of {old} is dropped ({error}); count one for the new checkpoint with "
            "`openjet-jax draft-vocab`"
        )
    assert draft is not None
    write_list(new, checkpoint, draft)
    return f"the draft list of {old} is kept: {draft}"


def remove_list(directory: Path) -> bool:
    """Removes a checkpoint's list; returns whether there was one."""
    path = directory / FILE
    there = path.exists()
    path.unlink(missing_ok=True)
    return there
