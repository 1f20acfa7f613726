"""From a name to a `Model`: a checkpoint, a .gguf file (converted once), or the word `tiny`.

A checkpoint made from a .gguf lies beside it, or in the user's cache directory where that folder
cannot be written; it is used again as long as the file is the same.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openjet_jax.chat import ChatTemplate, render_ids
from openjet_jax.checkpoint import (
    TEMPLATE_FILE,
    CheckpointConfig,
    CheckpointError,
    DamagedCheckpoint,
    TensorEntry,
    default_destination,
    is_checkpoint,
    read_config,
)
from openjet_jax.config import DecodeConfig, ModelConfig
from openjet_jax.draft_list import DraftList, DraftVocab, chosen_list
from openjet_jax.drafting_weights import load_packed, load_tiled
from openjet_jax.program_store import ProgramStore, cache_directory
from openjet_jax.tiling import resolve_backend
from openjet_jax.tokenizer import Tokenizer
from openjet_jax.weights import Weights

TINY = "tiny"
"""Names the bundled model, unless there is a file or directory of that name."""

_TINY_FILE = Path(__file__).parent / "tiny" / "openjet-tiny-code-Q4_K_M.gguf"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A loaded model.

    Attributes:
      config: its sizes.
      weights: on the device.
      tokenizer: text to ids and back.
      template: its chat template, or None.
      notes: what was disregarded or inferred when it was converted.
      facts: what its file says of itself: name, licence, recommended sampling.
      hash: SHA-256 that names the checkpoint.
      directory: of the checkpoint.
      backend: "mosaic" or "reference".
      store: where its programs are kept.
      tensors: what the checkpoint holds.
      draft: the tokens it drafts over, or None where it has no MTP block.
      programs: compiled programs by the shapes they are for.
    """

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    template: ChatTemplate | None
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    hash: str
    directory: Path
    backend: str
    store: ProgramStore
    tensors: tuple[TensorEntry, ...] = dataclasses.field(repr=False)
    draft: DraftList | None = None
    programs: dict[DecodeConfig, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def without_mtp(self) -> str:
        """Why a model without an MTP block has none, as the end of a sentence."""
        reasons = [note for note in self.notes if "no drafts can be made" in note]
        return reasons[0] if reasons else "the model has no MTP block"

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Returns the ids of a conversation's prompt; see `chat.render_ids`.

        Raises:
          ValueError: the model has no chat template.
          ChatError: the template refuses the conversation.
        """
        if self.template is None:
            raise ValueError(f"{self.directory.name} has no chat template; give a prompt instead")
        return render_ids(self.tokenizer, self.template, messages, **options)


def load(
    name: str | os.PathLike[str],
    *,
    backend: str = "auto",
    draft_vocab: DraftVocab = None,
    draft_head: str | None = None,
) -> Model:
    """Returns a model with its weights on the device.

    Args:
      name: a checkpoint's directory; a .gguf file, converted first unless that was done before (and
        again if what was made then is damaged); or `tiny`, the bundled model.
      backend: "mosaic" runs the kernels for sm_90 GPUs, "reference" plain `jax.numpy`; "auto" takes
        the kernels where they run.
      draft_vocab: the tokens that drafts are made of: "full", "default" (32,768 tokens, see
        `draft_list.frequent_ids`), the size of such a list, or token ids. By default the list that
        `openjet-jax draft-vocab` wrote into the checkpoint, else the full vocabulary up to 32,768
        tokens and the default list above that. It changes speed and never text.
      draft_head: "same" copies the listed rows of the head as they are, "q4" rounds them to four
        bits; by default what the checkpoint's list says, else "same".

    Raises:
      CheckpointError: the checkpoint is missing, damaged, or of another version.
      ValueError: the .gguf is not a sound model of a supported kind; or drafts are asked for that
        cannot be made.
      OSError: the system refuses, or the disk has not enough room.
    """
    backend = resolve_backend(backend)
    directory = checkpoint_of(name)
    try:
        return _loaded(directory, backend, draft_vocab, draft_head)
    except DamagedCheckpoint as damage:
        source = located(name)
        if source.is_dir():
            raise
        print(f"openjet-jax: {damage}: doing that with {source.name}", file=sys.stderr)
        _convert(source, directory, force=True)
    return _loaded(directory, backend, draft_vocab, draft_head)


def _loaded(
    directory: Path, backend: str, draft_vocab: DraftVocab, draft_head: str | None
) -> Model:
    """Returns the model of a checkpoint; arguments are those of `load`, the backend resolved."""
    config = read_config(directory)
    store = ProgramStore(cache_directory() / "programs", f"{config.hash}-{backend}")
    tokenizer = _saved_tokenizer(directory)
    draft = None
    if config.model.has_mtp:
        draft = chosen_list(directory, config.hash, tokenizer, draft_vocab, draft_head)
    elif draft_head is not None or not (draft_vocab is None or _is_full(draft_vocab)):
        raise ValueError(
            f"{directory.name} has no MTP block and makes no drafts; leave out {draft_vocab=} and "
            f"{draft_head=}"
        )
    read_weights = load_tiled if backend == "mosaic" else load_packed
    weights = read_weights(directory, config, draft)
    template = directory / TEMPLATE_FILE
    return Model(
        config=config.model,
        weights=weights,
        tokenizer=tokenizer,
        template=ChatTemplate(template.read_text(encoding="utf-8")) if template.exists() else None,
        notes=config.notes,
        facts=config.provenance["facts"],
        hash=config.hash,
        directory=directory,
        backend=backend,
        store=store,
        tensors=config.tensors,
        draft=draft,
    )


def _is_full(draft_vocab: DraftVocab) -> bool:
    """Whether drafts are asked for over the full vocabulary: no wish that a model can fail."""
    return isinstance(draft_vocab, str) and draft_vocab == "full"


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """Returns a model's tokenizer alone; a .gguf need not hold tensors, and is not converted.

    Raises:
      ValueError: there is no sound tokenizer.
    """
    path = located(name)
    if path.is_dir():
        return _saved_tokenizer(path)
    from openjet_jax.convert.gguf import open_gguf

    return Tokenizer.from_tables(open_gguf(path).metadata)


def load_template(name: str | os.PathLike[str]) -> ChatTemplate:
    """Returns a model's chat template alone; a .gguf is not converted.

    Raises:
      ValueError: there is none.
    """
    path = located(name)
    if path.is_dir():
        file = path / TEMPLATE_FILE
        source = file.read_text(encoding="utf-8") if file.exists() else None
    else:
        from openjet_jax.convert.gguf import open_gguf

        source = open_gguf(path).metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        raise ValueError(f"{path} has no chat template")
    return ChatTemplate(source)


def contents(name: str | os.PathLike[str]) -> CheckpointConfig:
    """Returns what a checkpoint holds, or what converting a .gguf would give, weights unread.

    Raises:
      ValueError: it is neither, or not sound.
    """
    path = located(name)
    if path.is_dir():
        return read_config(path)
    from openjet_jax.convert.model_file import read_model
    from openjet_jax.convert.pipeline import describe

    return describe(read_model(path))


def located(name: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a checkpoint's directory or a .gguf file.

    Raises:
      CheckpointError: there is neither.
    """
    path = Path(name).expanduser()
    if os.fspath(name) == TINY and not path.exists():
        return _TINY_FILE
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.absolute()
    what = "is no .gguf file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {what}; give a checkpoint's directory, a .gguf file, or `{TINY}`"
    )


def checkpoint_of(name: str | os.PathLike[str]) -> Path:
    """Returns the directory of a checkpoint, made first from a .gguf that has none yet.

    Raises:
      ValueError, OSError: as `convert_gguf`.
    """
    path = located(name)
    if path.is_dir():
        return path
    bundled = path == _TINY_FILE
    target = _cached(path) if bundled else default_destination(path)
    if not bundled and not target.exists() and not os.access(path.parent, os.W_OK):
        target = _cached(path)
    while (state := _state_of(target, path)) != "its own":
        if state == "foreign" and target == _cached(path):
            # Nobody else writes there: it is what is left of a checkpoint.
            shutil.rmtree(target)
        elif state == "foreign":
            raise CheckpointError(
                f"{target} is in the way of a checkpoint of {path.name}; move it, or convert to "
                "another directory with `openjet-jax convert -o` and load that"
            )

        again = " again: the file or the format has changed" if state == "stale" else ""
        print(f"openjet-jax: converting {path.name} to {target}{again}", file=sys.stderr)
        # It exists now if another process was making it.
        with contextlib.suppress(FileExistsError):
            _convert(path, target, force=state == "stale")
    return target


def _convert(path: Path, target: Path, *, force: bool) -> None:
    """Makes a checkpoint of a .gguf, waiting for another process that is making it."""
    from openjet_jax.convert.pipeline import convert_gguf

    convert_gguf(path, target, force=force, wait=True, quiet=path == _TINY_FILE)


def _cached(path: Path) -> Path:
    """Returns where the user's cache keeps the checkpoint of a file."""
    folder = cache_directory()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    return folder / "checkpoints" / f"{path.stem}-{place}"


def _state_of(target: Path, path: Path) -> str:
    """Returns what `target` is to a .gguf: "absent", "its own", "stale", or "foreign"."""
    if not os.path.lexists(target):
        return "absent"
    try:
        files = read_config(target).provenance["files"]
    except CheckpointError:
        return "stale" if is_checkpoint(target) else "foreign"
    unchanged = any(file["name"] == path.name for file in files) and all(
        _unchanged(path.parent / file["name"], file) for file in files
    )
    return "its own" if unchanged else "stale"


def _unchanged(path: Path, file: Mapping[str, Any]) -> bool:
    try:
        stat = path.stat()
    except OSError:
        return False
    if stat.st_size != file["bytes"]:
        return False
    if stat.st_mtime_ns == file["modified_ns"]:
        return True
    # A copy or a fresh installation has another date.
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest() == file["sha256"]


def _saved_tokenizer(directory: Path) -> Tokenizer:
    try:
        return Tokenizer.load(directory)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{error.filename} is missing; convert the model again") from None
    except ValueError as error:
        raise DamagedCheckpoint(str(error)) from error
