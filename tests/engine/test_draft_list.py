"""Which tokens are listed, and the file in a checkpoint that says so."""

import json

import numpy as np
import pytest
from small_tables import small_tables

from openjet_jax import cli
from openjet_jax.checkpoint import CheckpointError
from openjet_jax.draft_list import (
    DEFAULT_SIZE,
    FILE,
    DraftList,
    added_ids,
    chosen_list,
    count_files,
    counted_list,
    frequent_ids,
    read_list,
    remove_list,
    write_list,
)
from openjet_jax.tokenizer import Tokenizer

HASH = "0" * 64


class Large:
    """A tokenizer of a published size, as far as a default list looks at it."""

    vocab_used = 248_077
    control_tokens = {"<|im_end|>": 248_046}
    user_defined_tokens = {"<think>": 248_068}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_tables(small_tables())


def test_the_default_list_is_the_added_tokens_and_the_lowest_ids(tmp_path):
    draft = chosen_list(tmp_path, HASH, Large())  # pyright: ignore[reportArgumentType]
    assert draft.ids is not None and draft.ids.dtype == np.int32
    lowest = range(DEFAULT_SIZE - 2)
    np.testing.assert_array_equal(draft.ids, [*lowest, 248_046, 248_068])
    np.testing.assert_array_equal(draft.ids, draft.head_rows(248_320))


def test_a_small_vocabulary_is_drafted_in_full_unless_asked(tokenizer, tmp_path):
    assert chosen_list(tmp_path, HASH, tokenizer).head_rows(300) is None
    rounded = chosen_list(tmp_path, HASH, tokenizer, head="q4")
    np.testing.assert_array_equal(rounded.head_rows(300), np.arange(300))
    whole, few = (chosen_list(tmp_path, HASH, tokenizer, vocab).ids for vocab in ("default", 12))
    np.testing.assert_array_equal(whole, np.arange(tokenizer.vocab_used))
    assert few is not None and few.size == 12 and added_ids(tokenizer) <= set(few.tolist())
    np.testing.assert_array_equal(chosen_list(tmp_path, HASH, tokenizer, [9, 3]).ids, [3, 9])


@pytest.mark.parametrize(
    ("vocab", "head", "message"),
    [
        ("most", None, "'full', 'default', a size, or token ids"),
        (0, None, "size=0 must be in 1"),
        (10**6, None, "size=1000000 must be in 1"),
        ([1, 1], None, "token 1 is listed twice"),
        ([10**6], None, "must be in 0"),
        ([], None, "at least one token id"),
        ([0.5], None, "not float64"),
        ("full", "q5", "draft_head='q5' is unknown; use one of same, q4"),
    ],
)
def test_what_cannot_be_listed_is_refused(tokenizer, tmp_path, vocab, head, message):
    with pytest.raises(ValueError, match=message):
        chosen_list(tmp_path, HASH, tokenizer, vocab, head)


def test_the_most_counted_tokens_come_first_and_ties_go_to_the_lowest():
    counts = np.array([0, 5, 0, 9, 5, 0, 1])
    np.testing.assert_array_equal(frequent_ids(counts, {2}, 4), [1, 2, 3, 4])
    np.testing.assert_array_equal(frequent_ids(counts, {2}, 3), [1, 2, 3])
    np.testing.assert_array_equal(frequent_ids(counts, {2}, 6), [0, 1, 2, 3, 4, 6])


def test_text_ids_and_generated_output_are_counted_alike(tokenizer, tmp_path):
    text = "the end\nthe thé <|im_end|>\r\n" * 3
    ids = tokenizer.encode(text, special=True)
    (tmp_path / "a.txt").write_bytes(text.encode())
    np.save(tmp_path / "b.npy", np.asarray(ids, np.uint16))
    (tmp_path / "c.json").write_text(json.dumps({"text": "", "token_ids": ids}))
    expected = np.bincount(ids, minlength=tokenizer.vocab_used)
    for name in ("a.txt", "b.npy", "c.json"):
        np.testing.assert_array_equal(count_files(tokenizer, [tmp_path / name]), expected)
    (tmp_path / "d.json").write_text('{"other": "the"}')
    assert count_files(tokenizer, [tmp_path / "d.json"]).sum() > 0
    draft = counted_list(tokenizer, [tmp_path / "a.txt", tmp_path / "b.npy"], 16)
    assert draft.counted == 2 * len(ids) and 0 < draft.covered <= draft.counted
    assert tokenizer.control_tokens["<|im_end|>"] in draft.ids


def test_a_file_without_ids_of_this_vocabulary_is_refused(tokenizer, tmp_path):
    np.save(tmp_path / "large.npy", np.array([10**6]))
    np.save(tmp_path / "floats.npy", np.array([0.5]))
    (tmp_path / "empty.txt").touch()
    for name, message in (("large", "must be in 0"), ("floats", "integers, not float64")):
        with pytest.raises(ValueError, match=message):
            count_files(tokenizer, [tmp_path / f"{name}.npy"])
    with pytest.raises(ValueError, match="nothing was counted"):
        count_files(tokenizer, [tmp_path / "empty.txt"])


def test_a_written_list_is_read_back_used_and_removed(tokenizer, tmp_path):
    draft = DraftList(ids=np.array([2, 3, 9], np.int32), head="q4", counted=50, covered=40)
    write_list(tmp_path, HASH, draft)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    for found in (read_list(tmp_path, HASH, 100), chosen_list(tmp_path, HASH, tokenizer)):
        assert found is not None
        np.testing.assert_array_equal(found.ids, draft.ids)
        assert (found.head, found.counted, found.covered) == ("q4", 50, 40)
        assert str(found) == "3 listed tokens, 80.00% of the counted text through a 4-bit head"
    assert chosen_list(tmp_path, HASH, tokenizer, head="same").head == "same"
    assert chosen_list(tmp_path, HASH, tokenizer, "full").ids is None
    assert remove_list(tmp_path) and not remove_list(tmp_path)
    assert read_list(tmp_path, HASH, 100) is None


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": "1" * 64},
        {"version": 2},
        {"kind": "other"},
        {"ids": [1, 1]},
        {"ids": "all"},
        {"head": "q5"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_list_of_another_checkpoint_or_a_damaged_one_is_refused(tmp_path, change):
    path = write_list(tmp_path, HASH, DraftList(ids=np.array([1, 2], np.int32)))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match="draft-vocab.*--reset"):
        read_list(tmp_path, HASH, 100)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_list(tmp_path, HASH, 100)


def test_a_write_that_fails_leaves_the_list_before(tmp_path, monkeypatch):
    first = DraftList(ids=np.array([1, 2], np.int32))
    write_list(tmp_path, HASH, first)

    def refuse(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_list(tmp_path, HASH, DraftList(ids=np.array([3], np.int32)))
    found = read_list(tmp_path, HASH, 100)
    assert found is not None and [path.name for path in tmp_path.iterdir()] == [FILE]
    np.testing.assert_array_equal(found.ids, first.ids)


def test_the_command_counts_writes_and_resets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENJET_CACHE", str(tmp_path))
    (tmp_path / "words.txt").write_text("def f(x):\n    return x\n")
    assert cli.main(["draft-vocab", "tiny", str(tmp_path / "words.txt"), "--size", "512"]) == 0
    assert "512 listed tokens, 100.00% of the counted text" in capsys.readouterr().out
    (path,) = tmp_path.glob(f"checkpoints/*/{FILE}")
    assert len(json.loads(path.read_text())["ids"]) == 512
    assert cli.main(["draft-vocab", "tiny", "--reset"]) == 0
    assert not path.exists()
    assert cli.main(["draft-vocab", "tiny"]) == 2
    assert "give either files to count or --reset" in capsys.readouterr().err
