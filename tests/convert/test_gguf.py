"""The container: values, maps of tensors, split files, limits on the header."""

import pathlib
import struct
import time

import gguf
import numpy as np
import pytest
from gguf_cases import MALFORMED, U32, small_keys, small_tensors, write_gguf

from openjet_jax.convert import gguf_header
from openjet_jax.convert.gguf import GGUFError, open_gguf

KEYS = {"general.architecture": "any"}


def test_values_come_back_as_python_values_and_arrays(tmp_path: pathlib.Path):
    keys = KEYS | {
        "a.flag": True,
        "a.int": -3,
        "a.float": 0.5,
        "a.text": "Ġ\n",
        "a.empty": "",
        "a.strings": ["x", "", "é"],
        "a.ints": [1, -2, 3],
        "a.bools": [True, False],
    }
    file = open_gguf(write_gguf(tmp_path / "m.gguf", keys, {}))
    ints, bools = file.metadata.pop("a.ints"), file.metadata.pop("a.bools")
    assert file.metadata == {k: v for k, v in keys.items() if k not in ("a.ints", "a.bools")}
    assert isinstance(ints, np.ndarray) and ints.dtype == np.int32 and ints.tolist() == [1, -2, 3]
    assert isinstance(bools, np.ndarray) and bools.tolist() == [True, False]


def test_a_tensor_is_mapped_with_its_bytes_and_its_numpy_shape(tmp_path: pathlib.Path):
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "v": np.ones(5, np.float16)}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", KEYS, tensors))
    w, v = file.tensors["w"], file.tensors["v"]
    assert w.shape == (3, 4) and w.type == gguf.GGMLQuantizationType.F32 and w.nbytes == 48
    assert isinstance(w.data, np.memmap) and w.data.shape == (3, 16)
    np.testing.assert_array_equal(w.data.view(np.float32), tensors["w"])
    assert v.shape == (5,) and v.data.shape == (1, 10)
    with pytest.raises(ValueError, match="read-only"):
        w.data[0, 0] = 1


def test_records_equal_those_of_the_gguf_package():
    path = MALFORMED["qwen35"] / "b01.gguf"
    records = open_gguf(path).tensors
    theirs = gguf.GGUFReader(path).tensors
    assert list(records) == [tensor.name for tensor in theirs]
    for tensor in theirs:
        record = records[tensor.name]
        assert record.shape == tuple(tensor.shape.tolist())[::-1]
        assert (record.type, record.nbytes) == (tensor.tensor_type, tensor.n_bytes)
        np.testing.assert_array_equal(record.data.ravel(), tensor.data.view(np.uint8).ravel())


def test_a_file_with_a_vocabulary_only_opens(tmp_path: pathlib.Path):
    keys = KEYS | {"tokenizer.ggml.tokens": ["a", "b"]}
    file = open_gguf(write_gguf(tmp_path / "vocab.gguf", keys, {}))
    assert file.tensors == {} and file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]


def test_a_vocabulary_of_full_size_opens_in_seconds(tmp_path: pathlib.Path):
    tokens = [f"token {i}".encode() for i in range(248_320)]
    strings = b"".join(struct.pack("<Q", len(token)) + token for token in tokens)
    key = b"tokenizer.ggml.tokens"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "vocab.gguf"
    path.write_bytes(start + struct.pack("<IIQ", 9, 8, len(tokens)) + strings)
    began = time.process_time()
    read = open_gguf(path).metadata["tokenizer.ggml.tokens"]
    assert time.process_time() - began < 5
    assert isinstance(read, list) and read[-1] == "token 248319" and len(read) == len(tokens)


def test_a_header_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(GGUFError, match="longest header 4096|limit of 4096"):
        open_gguf(MALFORMED["qwen35"] / "b00.gguf")


def test_more_keys_or_tensors_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_header, "MAX_ENTRIES", 26)
    with pytest.raises(GGUFError, match="tensor count 27 is beyond the limit of 26"):
        open_gguf(MALFORMED["qwen35"] / "b00.gguf")


def test_tensors_that_overlap_are_refused(tmp_path: pathlib.Path):
    path = write_gguf(tmp_path / "m.gguf", KEYS, {n: np.ones(100, np.float32) for n in "ab"})
    content = path.read_bytes()
    offset = (416).to_bytes(8, "little")
    assert content.count(offset) == 1
    path.write_bytes(content.replace(offset, (384).to_bytes(8, "little")))
    with pytest.raises(GGUFError, match="'a' and 'b' overlap"):
        open_gguf(path)


def test_what_is_no_regular_file_is_refused_and_what_is_not_there_is_an_os_error(
    tmp_path: pathlib.Path,
):
    with pytest.raises(GGUFError, match="not a regular file"):
        open_gguf(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_gguf(tmp_path / "absent.gguf")


def split(folder: pathlib.Path, **changes: int) -> list[pathlib.Path]:
    """Writes a small model in three parts, the first without tensors."""
    tensors = list(small_tensors().items())
    groups = [{}, dict(tensors[:10]), dict(tensors[10:])]
    paths = []
    for i, group in enumerate(groups):
        keys = (small_keys() if i == 0 else KEYS) | {
            "split.no": U32(i),
            "split.count": U32(3),
            "split.tensors.count": len(tensors),
        }
        if i == changes.get("part"):
            keys |= {f"split.{name}": U32(n) for name, n in changes.items() if name != "part"}
        paths.append(write_gguf(folder / f"m-{i + 1:05d}-of-00003.gguf", keys, group))
    return paths


def test_a_split_file_opens_from_any_part(tmp_path: pathlib.Path):
    parts = split(tmp_path)
    for path in parts:
        file = open_gguf(path)
        assert file.path == path and file.parts == tuple(parts)
        assert file.metadata["qwen35.block_count"] == 2
        assert list(file.tensors) == list(small_tensors())
        for name, tensor in small_tensors().items():
            np.testing.assert_array_equal(
                file.tensors[name].data.view(np.float32).ravel(), tensor.ravel()
            )


def test_a_missing_part_is_named(tmp_path: pathlib.Path):
    parts = split(tmp_path)
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(GGUFError, match="m-00002-of-00003.gguf.*missing"):
            open_gguf(path)


def test_a_split_file_under_another_name_says_what_the_name_must_be(tmp_path: pathlib.Path):
    path = split(tmp_path)[0].rename(tmp_path / "other.gguf")
    with pytest.raises(GGUFError, match="-of-00003.gguf"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part": 1, "no": 2}, "split.no=2"),
        ({"part": 2, "count": 4}, "split.count=4"),
        ({"part": 0, "tensors.count": 99}, "split.tensors.count=99"),
    ],
)
def test_parts_that_disagree_are_refused(tmp_path: pathlib.Path, changes: dict, message: str):
    with pytest.raises(GGUFError, match=message):
        open_gguf(split(tmp_path, **changes)[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: pathlib.Path):
    parts = split(tmp_path)
    keys = KEYS | {"split.no": U32(2), "split.count": U32(3)}
    write_gguf(parts[2], keys, {"token_embd.weight": np.ones((2, 4), np.float32)})
    with pytest.raises(GGUFError, match="duplicate tensor 'token_embd.weight'"):
        open_gguf(parts[0])
