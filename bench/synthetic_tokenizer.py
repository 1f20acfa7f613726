"""A byte-level BPE vocabulary and chat template of our own, in the shape of Qwen3.5's.

Single bytes come first, in GPT-2's order, then what the merges make; then 33 added tokens under
their real names, then unused rows. Merges build words of up to four letters from the commonest
letters, so that any text tokenizes, plain English at about three characters a token.
"""

import itertools
from collections.abc import Iterator

from gguf import GGUFWriter, TokenType

ADDED = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> "
    "<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> "
    "<|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> "
    "<|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> "
    "<think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> "
    "<tts_text_bos_single> <|audio_pad|>"
).split()
"""The added tokens in the order of their ids; those from 14 to 25 are recognised in any text."""

MOST_UNUSED, MOST_UNMERGED = 243, 201
"""Rows of the published vocabulary without a token, and tokens that no merge makes."""

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
SPACE, NEWLINE = "\u0120", "\u010a"

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content | trim + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def byte_letters() -> list[str]:
    """Returns the 256 letters that stand for bytes in GPT-2's alphabet, in id order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in plain] + [chr(256 + n) for n in range(256 - len(plain))]


def merges(count: int) -> list[tuple[str, str]]:
    """Returns the first `count` merges: spaces, pairs, words of three, then of four letters."""
    pairs = [left + right for left in LETTERS for right in LETTERS]
    rank = {pair: LETTERS.index(pair[0]) + LETTERS.index(pair[1]) for pair in pairs}

    def words_of_four() -> Iterator[tuple[str, str]]:
        words = [(left, right) for left in pairs for right in pairs]
        yield from sorted(words, key=lambda word: rank[word[0]] + rank[word[1]])

    ranked = itertools.chain(
        [(SPACE, SPACE), (SPACE * 2, SPACE * 2), (SPACE * 4, SPACE * 4), (NEWLINE, NEWLINE)],
        ((SPACE, letter) for letter in LETTERS + LETTERS.upper()),
        ((left, right) for left in LETTERS for right in LETTERS),
        ((SPACE + letter, pair) for letter in LETTERS for pair in pairs),
        ((pair, letter) for pair in pairs for letter in LETTERS),
        ((SPACE + left, right) for left in LETTERS for right in LETTERS),
        words_of_four(),
    )
    return list(itertools.islice(ranked, count))


def vocab_parts(vocab: int) -> tuple[int, int, int]:
    """Returns how many of `vocab` rows are merged tokens, tokens without a merge, and unused.

    Raises:
      ValueError: the vocabulary has no room for single bytes and added tokens.
    """
    spare = vocab - 256 - len(ADDED)
    if spare < 0:
        raise ValueError(f"{vocab=} must be at least {256 + len(ADDED)}: bytes and added tokens")
    unused = min(MOST_UNUSED, spare // 8)
    unmerged = min(MOST_UNMERGED, spare // 8)
    return spare - unused - unmerged, unmerged, unused


def add_tokenizer(writer: GGUFWriter, vocab: int) -> None:
    """Writes the keys of a complete tokenizer with `vocab` rows, and the chat template."""
    num_merges, unmerged, unused = vocab_parts(vocab)
    pairs = merges(num_merges)
    normal = byte_letters() + ["".join(pair) for pair in pairs]
    normal += [f"unmerged{n}" for n in range(unmerged)]
    first, last = ADDED.index("<tool_call>"), ADDED.index("</think>")
    added = [
        TokenType.USER_DEFINED if first <= n <= last else TokenType.CONTROL
        for n in range(len(ADDED))
    ]
    used = len(normal) + len(ADDED)
    types = [TokenType.NORMAL] * len(normal) + added + [TokenType.UNUSED] * unused
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([*normal, *ADDED, *(f"[PAD{used + n}]" for n in range(unused))])
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in pairs])
    writer.add_eos_token_id(len(normal) + ADDED.index("<|im_end|>"))
    writer.add_pad_token_id(len(normal) + ADDED.index("<|endoftext|>"))
    writer.add_bos_token_id(len(normal) + ADDED.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
