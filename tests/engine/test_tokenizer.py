import json
import time

import hypothesis
import hypothesis.strategies as st
import pytest
from small_tables import CONTROL_TOKENS, MERGES, PADDING, SHARED, USER_TOKENS, small_tables

from openjet_jax.convert.gguf import open_gguf
from openjet_jax.tokenizer import Detokenizer, Tokenizer

GOLDEN = SHARED / "golden" / "tokenizer"
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the shared golden files")

SMALL = Tokenizer.from_tables(small_tables())
ADDED = CONTROL_TOKENS + USER_TOKENS

any_text = st.text(st.characters(exclude_categories=["Cs"]))
mixed_text = st.lists(any_text | st.sampled_from([*ADDED, " the", "\n\n", "é", "हिन्दी"])).map(
    "".join
)
any_ids = st.lists(st.integers(0, SMALL.vocab_size - 1))


def pieces_of(text: str) -> list[str]:
    """Returns what the pre-tokenizer cuts a text into."""
    split = SMALL._model.pre_tokenizer
    assert split is not None
    return [text[begin:end] for _, (begin, end) in split.pre_tokenize_str(text)]


@pytest.fixture(scope="module")
def large() -> Tokenizer:
    return Tokenizer.from_tables(open_gguf(GOLDEN / "ggml-vocab-qwen35.gguf").metadata)


@golden
def test_every_golden_text_has_its_ids_and_comes_back(large: Tokenizer):
    cases = json.loads((GOLDEN / "cases.json").read_text())
    assert len(cases) == 144
    for case in cases:
        assert large.encode(case["text"]) == case["ids"], case["text"]
        assert large.decode(case["ids"]) == case["text"]


@golden
def test_a_saved_large_tokenizer_is_equal_and_loads_in_seconds(large: Tokenizer, tmp_path):
    large.save(tmp_path)
    begin = time.process_time()
    loaded = Tokenizer.load(tmp_path)
    assert time.process_time() - begin < 4
    assert (loaded.vocab_size, loaded.stop_ids) == (151936, (151643, 151645))
    for case in json.loads((GOLDEN / "cases.json").read_text()):
        assert loaded.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize(
    "text, pieces",
    [
        (
            "I'll pay $12.50  now\n\n  ok",
            ["I", "'ll", " pay", " $", "1", "2", ".", "5", "0", " ", " now", "\n\n", " ", " ok"],
        ),
        ("foo_bar(baz)", ["foo", "_bar", "(baz", ")"]),
        ("  x = 3;\n\ty", [" ", " x", " =", " ", "3", ";\n", "\ty"]),
        ("हिन्दी", ["हिन्दी"]),
        ("don'T", ["don", "'T"]),
        ("e\u0301t", ["e\u0301t"]),
    ],
)
def test_a_text_is_split_as_the_specification_shows(text: str, pieces: list[str]):
    assert pieces_of(text) == pieces


def test_merges_go_by_rank_and_stay_inside_pieces():
    def tokens(text):
        return [SMALL.token_bytes(i).decode() for i in SMALL.encode(text)]

    assert tokens("in the end") == ["in", " the", " ", "end"]
    assert tokens("im_end") == ["im", "_", "end"]
    assert tokens("a  b") == ["a", " ", " ", "b"]
    assert tokens("a   b") == ["a", "  ", " ", "b"]


@hypothesis.given(mixed_text)
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_text_comes_back_from_its_ids(text: str):
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert SMALL.decode(SMALL.encode(text, special=True), skip_special=False) == text
    assert not set(ids) & set(SMALL.control_tokens.values())


def test_a_text_gets_no_token_before_or_after_it():
    assert SMALL.encode("") == []
    assert SMALL.encode("a") == [ord("a")]


def test_user_defined_tokens_are_always_read_and_control_tokens_on_request():
    text = "a<think>\n<|im_end|>"
    think, end = SMALL.user_defined_tokens["<think>"], SMALL.control_tokens["<|im_end|>"]
    assert SMALL.encode(text)[:3] == [ord("a"), think, ord("\n")]
    assert end not in SMALL.encode(text)
    assert SMALL.encode(text, special=True) == [ord("a"), think, ord("\n"), end]


def test_white_space_around_added_tokens_is_kept():
    assert SMALL.decode(SMALL.encode(" <think>  </think> ")) == " <think>  </think> "


def test_the_longest_added_token_is_found_first():
    tables = small_tables()
    tables["tokenizer.ggml.tokens"][-PADDING : -PADDING + 2] = ["abc", "bcdef"]
    tables["tokenizer.ggml.token_type"][-PADDING : -PADDING + 2] = [4, 4]
    tokenizer = Tokenizer.from_tables(tables)
    assert tokenizer.encode("abcdef")[-1] == tokenizer.user_defined_tokens["bcdef"]
    assert len(tokenizer.encode("abcdef")) == 2


def test_a_token_that_looks_like_control_is_never_user_defined():
    tables = small_tables()
    tables["tokenizer.ggml.token_type"] = [
        4 if k == 3 else k for k in small_tables()["tokenizer.ggml.token_type"]
    ]
    tokenizer = Tokenizer.from_tables(tables)
    assert set(tokenizer.control_tokens) == {t for t in CONTROL_TOKENS if "|" in t}
    assert tokenizer.stop_ids == SMALL.stop_ids


def test_nothing_is_normalised():
    composed, decomposed = SMALL.encode("\u00e9"), SMALL.encode("e\u0301")
    assert composed != decomposed
    assert SMALL.decode(decomposed) == "e\u0301"


def test_stop_ids_are_the_ends_of_turn_and_of_text_and_no_other():
    tables = small_tables()
    names = tables["tokenizer.ggml.tokens"]
    assert SMALL.stop_ids == (names.index("<|endoftext|>"), names.index("<|im_end|>"))
    tables["tokenizer.ggml.eos_token_id"] = names.index("<|im_start|>")
    tables["tokenizer.ggml.eot_token_id"] = names.index("<tts_pad>")
    expected = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>"]
    assert Tokenizer.from_tables(tables).stop_ids == tuple(map(names.index, expected))


def test_padding_rows_are_counted_and_stand_for_nothing():
    assert SMALL.vocab_size - SMALL.vocab_used == PADDING
    assert SMALL.decode(range(SMALL.vocab_used, SMALL.vocab_size)) == ""
    assert SMALL.decode(SMALL.encode("[PAD0]")) == "[PAD0]"


def test_control_tokens_are_left_out_of_a_text_or_kept():
    ids = SMALL.encode("a<|im_end|>b</think>", special=True)
    assert SMALL.decode(ids) == "ab</think>"
    assert SMALL.decode(ids, skip_special=False) == "a<|im_end|>b</think>"


@hypothesis.given(any_ids, st.booleans())
@hypothesis.settings(max_examples=300, deadline=None)
def test_streamed_text_is_whole_characters_and_joins_to_the_decoded_text(ids, skip):
    detokenizer = Detokenizer(SMALL, skip_special=skip)
    streamed = [detokenizer.push(i) for i in ids]
    tail = detokenizer.finish()
    expected = b"".join(
        SMALL.token_bytes(i) for i in ids if not (skip and i in SMALL.control_tokens.values())
    ).decode(errors="replace")
    assert "".join(streamed) + tail == SMALL.decode(ids, skip_special=skip) == expected
    assert tail in ("", "\ufffd")


@hypothesis.given(mixed_text)
@hypothesis.settings(max_examples=200, deadline=None)
def test_a_stream_cut_anywhere_never_cuts_a_character(text: str):
    ids = SMALL.encode(text)
    detokenizer, shown = Detokenizer(SMALL), ""
    for i in ids:
        shown += detokenizer.push(i)
        assert text.startswith(shown)
    assert shown == text and detokenizer.finish() == ""


def test_a_truncated_character_is_replaced_once():
    detokenizer = Detokenizer(SMALL)
    assert [detokenizer.push(i) for i in "🦙".encode()[:3]] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_saved_tokenizer_is_the_same(tmp_path):
    SMALL.save(tmp_path / "deep" / "er")
    loaded = Tokenizer.load(tmp_path / "deep" / "er")
    for name in ("vocab_size", "vocab_used", "stop_ids", "control_tokens", "user_defined_tokens"):
        assert getattr(loaded, name) == getattr(SMALL, name)
    text = "in the <think>\n\nend</think><|im_end|>é"
    for special in (False, True):
        assert loaded.encode(text, special) == SMALL.encode(text, special)
    assert loaded.decode(range(loaded.vocab_size)) == SMALL.decode(range(SMALL.vocab_size))


@pytest.mark.parametrize(
    "name, change",
    [
        ("tokenizer_config.json", lambda text: text.replace('"version": 1', '"version": 2')),
        ("tokenizer_config.json", lambda text: text.replace("stop_ids", "stops")),
        ("tokenizer_config.json", lambda text: text.replace("{", '{"more": 1,')),
        ("tokenizer_config.json", lambda text: "[]"),
        ("tokenizer_config.json", lambda text: "null"),
        ("tokenizer_config.json", lambda text: text.replace('"vocab_used": ', '"vocab_used": 9')),
        ("tokenizer.json", lambda text: text[:-9]),
    ],
)
def test_a_damaged_saved_tokenizer_is_refused_by_name(tmp_path, name, change):
    SMALL.save(tmp_path)
    text = (tmp_path / name).read_text()
    assert change(text) != text
    (tmp_path / name).write_text(change(text))
    with pytest.raises(ValueError, match="convert the model again") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def _broken(key: str, change) -> dict:
    tables = small_tables()
    tables[f"tokenizer.ggml.{key}"] = change(tables[f"tokenizer.ggml.{key}"])
    return tables


@pytest.mark.parametrize(
    "tables, message",
    [
        (_broken("model", lambda _: "llama"), "model='llama' is not supported, only 'gpt2'"),
        (_broken("pre", lambda _: "qwen2"), "pre='qwen2' is not supported, only 'qwen35'"),
        (_broken("pre", lambda _: None), "pre=None"),
        (_broken("tokens", lambda _: None), "tokens is missing"),
        (_broken("merges", lambda _: "a b"), "merges is missing or not a list"),
        (_broken("merges", lambda m: [*m, "ab"]), f"merge {len(MERGES)} 'ab' is not two tokens"),
        (_broken("merges", lambda m: [*m, "ab "]), "is not two tokens"),
        (_broken("merges", lambda m: [*m, "q z"]), "'qz' is not a token"),
        (_broken("merges", lambda m: [*m, "[PAD 0]"]), "'\\[PAD' is not a token"),
        (_broken("merges", lambda m: [*m, b"\xff a"]), "merge 12 is not UTF-8"),
        (_broken("tokens", lambda t: [*t[:-1], ""]), "token 281 is empty"),
        (_broken("tokens", lambda t: [*t[:-1], b"\xc3"]), "token 281 is not UTF-8"),
        (_broken("tokens", lambda t: [*t[:-1], 7]), "token 281 is 7, not text"),
        (_broken("tokens", lambda t: [*t[:-1], "a"]), "tokens 97 and 281 are both 'a'"),
        (_broken("tokens", lambda t: ["\u20ac", *t[1:]]), "stands for no byte"),
        (_broken("tokens", lambda t: ["zz", *t[1:]]), "1 single bytes are not tokens .*0x00"),
        (_broken("token_type", lambda k: k[:-1]), "281 token types for 282 tokens"),
        (_broken("token_type", lambda k: [*k[:-1], 6]), "type 6"),
        (_broken("eos_token_id", lambda _: 282), "stop id 282 is not a token"),
    ],
)
def test_malformed_tables_are_refused_with_a_reason(tables: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_tables(tables)


def test_texts_that_arrive_as_bytes_are_read():
    as_bytes = _broken("tokens", lambda tokens: [token.encode() for token in tokens])
    assert Tokenizer.from_tables(as_bytes).encode(" the") == SMALL.encode(" the")


@pytest.mark.parametrize("token_id", [-1, SMALL.vocab_size, 10**9, 2**70])
def test_an_id_that_does_not_exist_is_refused(token_id: int):
    with pytest.raises(ValueError, match=f"must be in 0..{SMALL.vocab_size - 1}"):
        SMALL.decode([token_id])


def test_a_lone_surrogate_is_refused_with_its_place():
    with pytest.raises(ValueError, match="character 2 of the text is a lone surrogate"):
        SMALL.encode("ab\ud800")
