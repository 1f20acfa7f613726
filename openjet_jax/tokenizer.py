"""Text to token ids and back, from a file's own tables.

The encoder is the `tokenizers` library's byte-level BPE. What is ours: which added tokens are read
from a text, and decoding that a stream can use. Prompts of a conversation are made in `chat`.
"""

import codecs
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from openjet_jax.vocabulary import BYTE_OF_CHAR, CONTROL, UNUSED, USER_DEFINED, read_vocabulary

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The `qwen35` split: merges never cross a boundary of these pieces."""

FORMAT_VERSION = 1
"""Version of the files that `Tokenizer.save` writes."""

MODEL_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


class Tokenizer:
    """Byte-level BPE with the added tokens of one model. Nothing is put before or after a text.

    Attributes:
      vocab_size: ids that have a row, padding rows at the end included.
      vocab_used: ids at and above this are padding and are never emitted.
      stop_ids: ids that end a text, ascending.
      control_tokens: id of each control token by text; read from a text only on request.
      user_defined_tokens: id of each user-defined token by text; always read from a text.
    """

    vocab_size: int
    vocab_used: int
    stop_ids: tuple[int, ...]
    control_tokens: Mapping[str, int]
    user_defined_tokens: Mapping[str, int]

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        vocab_used: int,
        stop_ids: Sequence[int],
    ):
        """Wraps a `tokenizers` model whose added tokens are marked special where they are control.

        Raises:
          ValueError: the sizes and ids do not fit the model.
        """
        added = model.get_added_tokens_decoder()
        if not 0 < vocab_used <= vocab_size:
            raise ValueError(f"{vocab_used=} must be in 1..{vocab_size}")
        for token_id in (*added, *stop_ids):
            if not 0 <= token_id < vocab_used:
                raise ValueError(f"token {token_id} must be below {vocab_used=}")
        self.vocab_size = vocab_size
        self.vocab_used = vocab_used
        self.stop_ids = tuple(stop_ids)
        self.control_tokens = _by_length({t.content: i for i, t in added.items() if t.special})
        self.user_defined_tokens = _by_length(
            {t.content: i for i, t in added.items() if not t.special}
        )
        self._all_added = _by_length({**self.control_tokens, **self.user_defined_tokens})
        # Added tokens are cut out before the model sees a text: what it still sees is plain text.
        model.encode_special_tokens = True
        self._model = model
        self._bytes = {i: t.content.encode() for i, t in added.items()}

    @classmethod
    def from_tables(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that a GGUF file describes.

        Args:
          metadata: the file's keys and values; only `tokenizer.ggml.*` is read.

        Raises:
          ValueError: a key is missing, the tokenizer is of another kind, or a table is malformed.
        """
        tables = read_vocabulary(metadata)
        kinds = tables.kinds
        ids = {token: i for i, token in enumerate(tables.tokens) if kinds[i] != UNUSED}
        model = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=list(tables.merges)))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated")
        model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
        model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        added = [i for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
        model.add_tokens([_added_token(tables.tokens[i], kinds[i] == CONTROL) for i in added])
        return cls(
            model,
            vocab_size=len(tables.tokens),
            vocab_used=tables.used,
            stop_ids=tables.stop_ids,
        )

    def save(self, directory: str | pathlib.Path):
        """Writes `tokenizer.json`, in the `tokenizers` format, and `tokenizer_config.json`."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._model.save(str(directory / MODEL_FILE), pretty=False)
        config = {
            "version": FORMAT_VERSION,
            "vocab_size": self.vocab_size,
            "vocab_used": self.vocab_used,
            "stop_ids": list(self.stop_ids),
        }
        (directory / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: str | pathlib.Path) -> "Tokenizer":
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: a file is not there.
          ValueError: a file is malformed or of another version; the message names it.
        """
        directory = pathlib.Path(directory)
        text = {name: (directory / name).read_bytes() for name in (MODEL_FILE, _CONFIG_FILE)}
        try:
            config = json.loads(text[_CONFIG_FILE])
            if config.pop("version") != FORMAT_VERSION:
                raise ValueError(f"its version is not {FORMAT_VERSION}")
            sizes = {key: int(config.pop(key)) for key in ("vocab_size", "vocab_used")}
            stop_ids = [int(token_id) for token_id in config.pop("stop_ids")]
            if config:
                raise ValueError(f"unknown keys {', '.join(config)}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(_damaged(directory / _CONFIG_FILE, error)) from error
        try:
            model = tokenizers.Tokenizer.from_buffer(text[MODEL_FILE])
        except Exception as error:  # the library raises bare Exception
            raise ValueError(_damaged(directory / MODEL_FILE, error)) from error
        try:
            return cls(model, **sizes, stop_ids=stop_ids)
        except ValueError as error:
            raise ValueError(_damaged(directory, error)) from error

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Returns the ids of a text, which is not normalised or trimmed.

        Added tokens are cut out first, the longest first: user-defined ones always, control ones
        only if asked. The text between them is split by `SPLIT_PATTERN` and merged by rank.

        Args:
          text: any text without lone surrogates.
          special: whether control tokens are read from the text. Not for untrusted text.

        Raises:
          ValueError: the text has a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the text is a lone surrogate, {text[error.start]!r}; "
                "read the text with errors='replace'"
            ) from None
        ids: list[int] = []
        for piece in cut(text, self._all_added if special else self.user_defined_tokens):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._model.encode(piece, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for; none for a padding row.

        Raises:
          ValueError: the id is not in 0..vocab_size - 1.
        """
        token_id = int(token_id)
        found = self._bytes.get(token_id)
        if found is None:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} must be in 0..{self.vocab_size - 1}")
            text = self._model.id_to_token(token_id) or ""
            found = self._bytes[token_id] = bytes(BYTE_OF_CHAR[char] for char in text)
        return found

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """Returns the text of ids; bytes that are not UTF-8 become U+FFFD.

        Args:
          token_ids: any integers in 0..vocab_size - 1.
          skip_special: whether control tokens are left out.

        Raises:
          ValueError: an id is out of range.
        """
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return (
            "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.finish()
        )


class Detokenizer:
    """Text of a stream of ids, of which each piece holds complete characters only.

    The pieces joined are `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        """Starts an empty text; control tokens are left out of it if `skip_special`."""
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.control_tokens.values() if skip_special else ())
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the characters that this id completes.

        Raises:
          ValueError: the id is out of range.
        """
        if int(token_id) in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Returns U+FFFD if the text ended inside a character, else nothing."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


def cut(text: str, tokens: Mapping[str, int]) -> Iterator[str | int]:
    """Yields the ids of `tokens` found in a text and the non-empty pieces of text between them.

    Tokens are looked for in the order of the mapping, each in what the earlier ones left.
    """
    pieces: list[str | int] = [text]
    for token, token_id in tokens.items():
        if token not in text:
            continue
        found: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                found.append(piece)
                continue
            for i, part in enumerate(piece.split(token)):
                if i:
                    found.append(token_id)
                found.append(part)
        pieces = found
    return (piece for piece in pieces if piece != "")


def _by_length(tokens: Mapping[str, int]) -> Mapping[str, int]:
    """The tokens in the order in which they are cut out: longest first, in bytes; then by id."""
    order = sorted(tokens, key=lambda token: (-len(token.encode()), tokens[token]))
    return MappingProxyType({token: tokens[token] for token in order})


def _added_token(text: str, control: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=control, normalized=False)


def _damaged(path: pathlib.Path, error: Exception) -> str:
    return f"{path} is not a tokenizer this version can read ({error}); convert the model again"
