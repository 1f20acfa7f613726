"""The tokenizer's tables as a GGUF file holds them, checked: tokens, their kinds, merges, stop ids.

Only byte-level BPE with the `qwen35` split is known here. Encoding and decoding are in `tokenizer`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of token, as GGUF numbers them. Control tokens are never read from untrusted text,
user-defined ones always are, unused rows are padding and are never emitted."""

END_TEXTS = ("<|im_end|>", "<|endoftext|>")
"""Tokens that end a text wherever they exist, whatever the file calls its end-of-sequence id."""

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

CHAR_OF_BYTE = {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(_OTHERS)}
"""GPT-2's alphabet: the printable character that stands for each byte in a normal token."""

BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}
_ALPHABET = frozenset(BYTE_OF_CHAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Checked tables of a byte-level BPE tokenizer.

    Attributes:
      tokens: text of each id. Normal tokens in GPT-2's byte alphabet, all others as themselves.
      kinds: kind of each id: `NORMAL`, `CONTROL`, `USER_DEFINED` or `UNUSED`.
      merges: pairs of tokens to join, the most urgent first.
      stop_ids: ids that end a text, ascending.
    """

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    stop_ids: tuple[int, ...]

    def __post_init__(self):
        """Raises ValueError naming the first token or merge that no encoder could use."""
        if len(self.kinds) != len(self.tokens):
            raise ValueError(
                f"{len(self.kinds)} token types for {len(self.tokens)} tokens; fetch the file again"
            )
        _check_tokens(self.tokens, self.kinds)
        pairs = zip(self.tokens, self.kinds, strict=True)
        _check_merges(self.merges, frozenset(token for token, kind in pairs if kind != UNUSED))
        for token_id in self.stop_ids:
            if not 0 <= token_id < len(self.tokens):
                raise ValueError(
                    f"stop id {token_id} is not a token; ids end at {len(self.tokens) - 1}"
                )

    @property
    def used(self) -> int:
        """Ids at and above this are padding rows at the end of the table."""
        used = len(self.kinds)
        while used and self.kinds[used - 1] == UNUSED:
            used -= 1
        return used


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Returns the checked tables held by a GGUF file's `tokenizer.ggml.*` keys.

    A token of the form `<|...|>` that the file calls user-defined is taken as control, as GGUF
    converters do: otherwise any user could write the end of a turn. The stop ids are the file's
    end-of-sequence and end-of-turn ids and the tokens of `END_TEXTS`, so that neither a chat nor a
    plain text runs on.

    Args:
      metadata: keys and values of the file. Texts may be bytes where they are not UTF-8.

    Raises:
      ValueError: a key is missing, the tokenizer is of another kind, or a table is malformed.
    """
    for key, known in (("model", "gpt2"), ("pre", "qwen35")):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value != known:
            raise ValueError(
                f"tokenizer.ggml.{key}={value!r} is not supported, only {known!r} is; "
                "use a GGUF file of a Qwen3.5, 3.6 or 3.8 model"
            )
    tokens = tuple(_text(t, f"token {i}") for i, t in enumerate(_table(metadata, "tokens")))
    kinds = [int(kind) for kind in _table(metadata, "token_type")]
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == USER_DEFINED and token.startswith("<|") and token.endswith("|>"):
            kinds[i] = CONTROL
    merges = tuple(_pair(m, i) for i, m in enumerate(_table(metadata, "merges")))
    return Vocabulary(
        tokens=tokens,
        kinds=tuple(kinds),
        merges=merges,
        stop_ids=_stop_ids(metadata, tokens, kinds),
    )


def _table(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        raise ValueError(
            f"tokenizer.ggml.{name} is missing or not a list; use a file that holds its tokenizer"
        )
    return value


def _text(value: object, what: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{what} is not UTF-8: {value!r} ({error.reason}); fetch the file again"
            ) from None
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, not text; fetch the file again")
    return value


def _pair(value: object, rank: int) -> tuple[str, str]:
    merge = _text(value, f"merge {rank}")
    cut = merge.find(" ", 1)
    if cut < 0 or cut == len(merge) - 1:
        raise ValueError(f"merge {rank} {merge!r} is not two tokens with a space between them")
    return merge[:cut], merge[cut + 1 :]


def _stop_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[int, ...]:
    declared = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    stops = {int(token_id) for token_id in declared if token_id is not None}
    stops.update(
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED) and token in END_TEXTS
    )
    return tuple(sorted(stops))


def _check_tokens(tokens: Sequence[str], kinds: Sequence[int]):
    ids: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if not token:
            raise ValueError(f"token {i} is empty; every token needs a text")
        if kind == NORMAL:
            if not _ALPHABET.issuperset(token):
                odd = next(char for char in token if char not in _ALPHABET)
                raise ValueError(
                    f"token {i} {token!r} has {odd!r}, which stands for no byte; "
                    "a token spelled as itself must be of type 3 or 4"
                )
        elif kind not in (CONTROL, USER_DEFINED, UNUSED):
            raise ValueError(f"token {i} {token!r} has type {kind}; types 1, 3, 4 and 5 are known")
        if ids.setdefault(token, i) != i:
            raise ValueError(f"tokens {ids[token]} and {i} are both {token!r}; texts must differ")
    missing = [byte for byte, char in CHAR_OF_BYTE.items() if char not in ids]
    if missing:
        raise ValueError(
            f"{len(missing)} single bytes are not tokens (the first is 0x{min(missing):02x}); "
            "byte-level BPE needs all 256"
        )


def _check_merges(merges: Sequence[tuple[str, str]], tokens: frozenset[str]):
    for rank, (left, right) in enumerate(merges):
        for part in (left, right, left + right):
            if part not in tokens:
                raise ValueError(f"merge {rank} {left!r} + {right!r}: {part!r} is not a token")
