"""A GGUF file becomes a checkpoint with the same values, whole or not at all."""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from openjet_jax.checkpoint import (
    CheckpointConfig,
    TensorEntry,
    default_destination,
    read_config,
)
from openjet_jax.convert import pipeline, publication
from openjet_jax.convert.gguf import GGUFError
from openjet_jax.convert.pipeline import convert_gguf
from openjet_jax.convert.publication import published_directory
from openjet_jax.stacks import load_weights
from openjet_jax.weights import Packed, Qwen35Weights, Weights
from pallas_kernels.formats import FORMATS

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "golden"
SHARED = ROOT.parent / "shared" / "golden" / "qwen35"
SMALL = DATA / "q4_1.gguf"
TINY = ROOT / "openjet_jax" / "tiny" / "openjet-tiny-code-Q4_K_M.gguf"
MALFORMED = ROOT / "tests" / "data" / "malformed"


def convert(source: pathlib.Path, target: pathlib.Path, force: bool = False) -> pathlib.Path:
    return convert_gguf(source, target, force=force, quiet=True)


def values(weights: Weights, config: CheckpointConfig) -> dict[tuple[str, str], np.ndarray]:
    """Returns the float32 values of every tensor of a loaded model by name and field."""
    packed: dict[tuple[str, int], list[tuple[TensorEntry, dict[str, np.ndarray]]]] = {}
    found = {}
    for entry in config.tensors:
        leaf: Any = weights
        for name in entry.field.split("."):
            leaf = getattr(leaf, name)
        if isinstance(leaf, Packed):
            stack, slot = leaf.table[entry.slot]
            planes = {n: np.asarray(plane)[slot] for n, plane in leaf.stacks[stack].items()}
            packed.setdefault((leaf.formats[stack], leaf.shape[1]), []).append((entry, planes))
        else:
            stacked = np.ndim(leaf) > len(entry.shape)
            found[entry.name, entry.field] = np.asarray(leaf)[entry.slot if stacked else ...]
    for (form, _), members in packed.items():
        # Rows are independent: those of all tensors at once compile one program, not one each.
        joined = {n: np.concatenate([planes[n] for _, planes in members]) for n in members[0][1]}
        rows = np.asarray(jax.jit(FORMATS[form].unpack)(joined))
        for entry, _ in members:
            found[entry.name, entry.field], rows = np.split(rows, [entry.shape[0]])
    return found


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def sources() -> list[pathlib.Path]:
    shared = sorted(SHARED.glob("*.gguf"))
    return [TINY, *(shared or sorted(DATA.glob("*.gguf")))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)
def test_loaded_values_equal_the_dequantised_file_bit_for_bit(path, tmp_path):
    target = convert(path, tmp_path / "model")
    config = read_config(target)
    _, weights = load_weights(target)
    found = values(weights, config)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert {name for name, _ in found} == tensors.keys()
    for (name, _), array in found.items():
        tensor = tensors[name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(
            bits(array), bits(expected.reshape(array.shape)), err_msg=name
        )


def test_orbax_itself_restores_the_same_planes_uncompressed(tmp_path):
    target = convert(SMALL, tmp_path / "model")
    tensors = read_config(target).tensors
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        tree = checkpointer.restore(target.absolute() / "weights" / "blk.0")
    block = [entry for entry in tensors if entry.block == "blk.0"]
    assert tree.keys() == {entry.field for entry in block}
    _, weights = load_weights(target)
    assert weights.deltanet is not None
    for name, plane in tree["deltanet.qkv"].items():
        np.testing.assert_array_equal(plane, weights.deltanet.qkv.stacks[0][name][0])
    chunks = (target / "weights").glob("*/*.*/0*")
    assert sum(f.stat().st_size for f in chunks) == sum(entry.nbytes for entry in tensors)


def test_the_contents_name_the_source_its_digest_and_every_format(tmp_path):
    target = convert(SMALL, tmp_path / "model")
    content = json.loads((target / "config.json").read_text())
    (file,) = content["provenance"]["files"]
    assert file["name"] == SMALL.name and file["bytes"] == SMALL.stat().st_size
    assert file["sha256"] == hashlib.sha256(SMALL.read_bytes()).hexdigest()
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(SMALL).tensors}
    assert {t["name"]: t["source_type"] for t in content["tensors"]} == types


def test_equal_sources_give_equal_hashes_and_other_weights_another(tmp_path):
    first = read_config(convert(SMALL, tmp_path / "first"))
    assert read_config(convert(SMALL, tmp_path / "again")).hash == first.hash
    changed = tmp_path / SMALL.name
    data = bytearray(SMALL.read_bytes())
    data[-40] ^= 1
    changed.write_bytes(data)
    os.utime(changed, ns=(SMALL.stat().st_atime_ns, SMALL.stat().st_mtime_ns))
    assert read_config(convert(changed, tmp_path / "other")).hash != first.hash


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model-Q4_K_M.gguf", "model-Q4_K_M"),
        ("model-00001-of-00003.gguf", "model"),
        ("model-1-of-3.gguf", "model-1-of-3"),
        ("weights", "weights.checkpoint"),
    ],
)
def test_the_default_destination_is_beside_the_source(name, expected):
    assert default_destination(pathlib.Path("/a", name)) == pathlib.Path("/a", expected)


def test_an_existing_destination_is_kept_without_force_and_replaced_with_it(tmp_path):
    target = convert(SMALL, tmp_path / "model")
    before = (target / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="--force"):
        convert(DATA / "q8_0.gguf", target)
    assert (target / "config.json").read_bytes() == before
    convert(DATA / "q8_0.gguf", target, force=True)
    assert {entry.source_type for entry in read_config(target).tensors} == {"Q8_0", "F32"}
    assert os.listdir(tmp_path) == ["model"]


def test_force_replaces_nothing_that_is_not_a_checkpoint(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a checkpoint"):
        convert(SMALL, precious, force=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_failure_in_the_middle_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    target = convert(SMALL, tmp_path / "model")
    before = (target / "config.json").read_bytes()
    write_block, calls = pipeline.write_block, []

    def failing(directory, block, leaves):
        calls.append(block)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write_block(directory, block, leaves)

    monkeypatch.setattr(pipeline, "write_block", failing)
    with pytest.raises(OSError, match="No space"):
        convert(DATA / "q8_0.gguf", target, force=True)
    assert (target / "config.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["model"]
    with pytest.raises(OSError, match="No space"):
        calls.clear()
        convert(DATA / "q8_0.gguf", tmp_path / "other")
    assert os.listdir(tmp_path) == ["model"]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=12_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"needs 0\.07 GB, but the disk has 0\.01 GB free"):
        convert(SMALL, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_a_weight_that_is_not_a_number_is_refused_by_name(tmp_path):
    source = tmp_path / "nan.gguf"
    shutil.copy(SMALL, source)
    tensor = next(t for t in gguf.GGUFReader(SMALL).tensors if t.name == "output_norm.weight")
    with open(source, "r+b") as file:
        file.seek(tensor.data_offset)
        file.write(np.float32("nan").tobytes())
    with pytest.raises(GGUFError, match=r"output_norm\.weight has NaN"):
        convert(source, tmp_path / "model")
    assert os.listdir(tmp_path) == ["nan.gguf"]


@pytest.mark.parametrize(
    "case",
    json.loads((MALFORMED / "expected.json").read_text())["files"],
    ids=lambda case: case["name"],
)
def test_a_malformed_file_leaves_no_checkpoint_and_a_sound_one_gives_a_whole(case, tmp_path):
    target = tmp_path / "model"
    try:
        convert(MALFORMED / case["file"], target)
    except (ValueError, OSError):
        assert case["expect"] != "load"
        assert os.listdir(tmp_path) == []
    else:
        assert case["expect"] != "error"
        _, weights = load_weights(target)
        assert isinstance(weights, Qwen35Weights) and weights.final_norm.size


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "moving.gguf"
    shutil.copy(SMALL, source)
    write_block = pipeline.write_block

    def touching(directory, block, leaves):
        os.utime(source)
        return write_block(directory, block, leaves)

    monkeypatch.setattr(pipeline, "write_block", touching)
    with pytest.raises(OSError, match="changed while"):
        convert(source, tmp_path / "model")
    assert os.listdir(tmp_path) == ["moving.gguf"]


STUCK = """
import sys, time
from openjet_jax.convert import pipeline
write_block = pipeline.write_block
def stuck(directory, block, leaves):
    if block == "blk.1":
        print("stuck", flush=True)
        time.sleep(600)
    return write_block(directory, block, leaves)
pipeline.write_block = stuck
pipeline.convert_gguf(sys.argv[1], sys.argv[2], quiet=True)
"""


@pytest.fixture
def stuck_conversion(tmp_path) -> Iterator[tuple[subprocess.Popen, pathlib.Path]]:
    """Starts a conversion in another process that stays in the middle of its blocks."""
    target = tmp_path / "model"
    arguments = [sys.executable, "-c", STUCK, str(SMALL), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == "stuck\n"
        yield process, target
    finally:
        process.kill()
        process.communicate()


def test_a_killed_conversion_leaves_no_checkpoint_and_the_next_run_succeeds(stuck_conversion):
    process, target = stuck_conversion
    assert (target.parent / ".model.partial" / "weights" / "blk.0").exists()
    with pytest.raises(BlockingIOError, match="another process"):
        convert(SMALL, target)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    convert(SMALL, target)
    load_weights(target)
    assert os.listdir(target.parent) == ["model"]


def test_a_waiting_writer_finds_the_directory_made(tmp_path):
    target = tmp_path / "model"

    def write_too():
        with pytest.raises(FileExistsError):
            with published_directory(target, force=False, wait=True):
                pass

    with ThreadPoolExecutor(1) as pool:
        with published_directory(target, force=False, wait=False) as partial:
            (partial / "a").write_text("first")
            waiting = pool.submit(write_too)
            time.sleep(0.1)
            assert not waiting.done()
        waiting.result(timeout=10)
    assert os.listdir(tmp_path) == ["model"]


def test_a_directory_is_exchanged_also_where_names_cannot_be(tmp_path, monkeypatch):
    target = tmp_path / "model"
    for content in ("first", "second"):
        with published_directory(target, force=True, wait=False) as partial:
            (partial / "a").write_text(content)
        monkeypatch.setattr(publication, "_exchange", lambda first, second: False)
    assert (target / "a").read_text() == "second"
    assert os.listdir(tmp_path) == ["model"]


def test_a_type_that_no_format_holds_is_refused_with_the_name_of_its_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "packed_format_of", lambda kind: None)
    with pytest.raises(
        GGUFError, match=r"token_embd\.weight has type Q8_0, which cannot be packed"
    ):
        convert(DATA / "q8_0.gguf", tmp_path / "model")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("architecture", "source"),
    [("qwen35", SMALL), ("qwen4exp", ROOT / "tests/data/golden_qwen4exp/q8_0_dense.gguf")],
    ids=["qwen35", "qwen4exp"],
)
def test_a_split_file_gives_the_same_weights_and_every_part_is_named(
    tmp_path, architecture, source
):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(tmp_path / "parts.gguf", architecture, split_max_tensors=12)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        shape = tuple(tensor.data.shape)
        writer.add_tensor(tensor.name, tensor.data, shape, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    whole = read_config(convert(source, tmp_path / "whole"))
    split = read_config(convert(parts[1], tmp_path / "split"))
    assert split.tensors == whole.tensors
    assert [file["name"] for file in split.provenance["files"]] == [p.name for p in parts]
    digests = [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts]
    assert [file["sha256"] for file in split.provenance["files"]] == digests
