"""A damaged or foreign checkpoint is refused with its cause; a name finds its model."""

import dataclasses
import json
import os
import pathlib
import shutil
import stat

import jax
import numpy as np
import pytest

from openjet_jax import stacks
from openjet_jax.architectures import initial_state
from openjet_jax.checkpoint import (
    VERSION,
    CheckpointError,
    PlaneEntry,
    checksum,
    read_config,
    write_config,
)
from openjet_jax.config import DecodeConfig
from openjet_jax.convert.pipeline import convert_gguf
from openjet_jax.draft_list import DraftList, read_list, write_list
from openjet_jax.inspection import inspect, render
from openjet_jax.leaf_files import verify
from openjet_jax.loading import checkpoint_of, load, load_template, load_tokenizer, located
from openjet_jax.memory import memory_plan
from openjet_jax.stacks import load_weights, weight_specs
from openjet_jax.weights import Packed, Qwen35Weights

DATA = pathlib.Path(__file__).parents[1] / "data" / "golden"
SMALL = DATA / "iq4_nl_recr.gguf"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return convert_gguf(SMALL, tmp_path_factory.mktemp("checkpoint") / "model", quiet=True)


@pytest.fixture
def checkpoint(original: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns a copy to damage."""
    return shutil.copytree(original, tmp_path / "model")


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Puts the user's cache directory into the test's own."""
    monkeypatch.delenv("OPENJET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "openjet-jax"


def largest_file(checkpoint: pathlib.Path, block: str) -> pathlib.Path:
    files = (f for f in (checkpoint / "weights" / block).rglob("*") if f.is_file())
    return max(files, key=lambda file: file.stat().st_size)


def rewrite(checkpoint: pathlib.Path, **changes: object) -> None:
    """Replaces entries of config.json by hand, as an editor would."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_specs_are_those_of_the_loaded_weights_and_read_none(checkpoint):
    config, weights = load_weights(checkpoint)
    shutil.rmtree(checkpoint / "weights")
    same_config, specs = weight_specs(checkpoint)
    assert same_config == config
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    assert jax.tree.structure(specs) == jax.tree.structure(weights)
    assert jax.tree.leaves(specs) == jax.tree.leaves(shapes)


def test_layers_of_two_formats_are_stacked_apart_and_found_through_the_table(tmp_path):
    directory = convert_gguf(located("tiny"), tmp_path / "model", quiet=True)
    tensors = read_config(directory).tensors
    _, weights = load_weights(directory)
    formats = [t.format for t in tensors if t.field == "ffn.down"]
    assert isinstance(weights, Qwen35Weights)
    down = weights.ffn.down
    assert isinstance(down, Packed)
    assert len(set(formats)) == len(down.stacks) == 2
    assert [down.formats[stack] for stack, _ in down.table] == formats
    counts = [next(iter(planes.values())).shape[0] for planes in down.stacks]
    assert counts == [formats.count(name) for name in down.formats]


def test_reading_ahead_is_bounded_and_changes_nothing(original, monkeypatch):
    _, weights = load_weights(original)
    monkeypatch.setattr(stacks, "READ_AHEAD_BYTES", 1)
    _, again = load_weights(original)
    jax.tree.map(np.testing.assert_array_equal, again, weights)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200_000])
def test_a_checksum_changes_with_every_kind_of_damage(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    before = checksum(data)
    assert checksum(data.copy()) == before
    for bit in {0, 8 * size // 2, 8 * size - 1} if size else ():
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        assert checksum(damaged) != before
    if size > 2 * 65536:
        moved = data.copy()
        moved[:65536], moved[65536 : 2 * 65536] = data[65536 : 2 * 65536], data[:65536]
        assert checksum(moved) != before
        assert checksum(np.concatenate([data[:65536], 0 * data[:65536], data[131072:]])) != before


READERS = pytest.mark.parametrize("reader", [load_weights, verify])


@READERS
def test_a_flipped_bit_in_a_weight_is_found(checkpoint, reader):
    path = largest_file(checkpoint, "token_embd")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"token_embd.*checksum differs.*convert the model"):
        reader(checkpoint)


@READERS
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99, 1.01])
def test_a_weight_file_of_another_size_is_refused(checkpoint, keep, reader):
    path = largest_file(checkpoint, "blk.1")
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(CheckpointError, match=r"blk\.1.*damaged"):
        reader(checkpoint)


@READERS
@pytest.mark.parametrize("what", ["weights", "weights/blk.2", "weights/blk.2/ffn.gate.codes/0.0"])
def test_missing_weights_are_refused_by_the_name_of_their_block(checkpoint, what, reader):
    path = checkpoint / what
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=r"weights/.*incomplete"):
        reader(checkpoint)


def test_blocks_that_changed_places_are_refused(checkpoint):
    first, second = (checkpoint / "weights" / name for name in ("blk.0", "blk.2"))
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)
    with pytest.raises(CheckpointError, match="checksum differs"):
        load_weights(checkpoint)


def test_an_edited_config_is_refused(checkpoint):
    model = json.loads((checkpoint / "config.json").read_text())["model"]
    rewrite(checkpoint, model=model | {"eps": 1e-5})
    with pytest.raises(CheckpointError, match="does not match its own hash"):
        read_config(checkpoint)


def test_another_version_is_refused_by_number(checkpoint):
    rewrite(checkpoint, version=VERSION + 1)
    message = f"version {VERSION + 1}, but this program reads version {VERSION}"
    with pytest.raises(CheckpointError, match=message):
        read_config(checkpoint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\udcff", "cannot be read"),
        ("[]", "not of an openjet-jax checkpoint"),
        ('{"architectures": ["Qwen3"]}', "not of an openjet-jax checkpoint"),
    ],
)
def test_a_foreign_or_broken_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_contents_that_contradict_themselves_are_refused_although_the_hash_is_right(checkpoint):
    config = read_config(checkpoint)
    first, *others = config.tensors

    def refused(message: str, tensors) -> None:
        write_config(checkpoint, dataclasses.replace(config, tensors=tuple(tensors)))
        with pytest.raises(CheckpointError, match=message):
            weight_specs(checkpoint)

    refused("no weights for embedding", others)
    refused("unknown weights wings", [*config.tensors, dataclasses.replace(first, field="wings")])
    refused("is missing or there twice", [*config.tensors, first])
    refused("packed format q9 of", [dataclasses.replace(first, format="q9"), *others])
    plane = PlaneEntry(shape=(1, 1), dtype="uint8", checksum="")
    refused("token_embd", [dataclasses.replace(first, planes={"codes": plane}), *others])


def test_a_directory_or_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for name, message in [
        ("", "is not a checkpoint: no config.json"),
        ("nowhere", "does not exist"),
        ("notes.txt", "is no .gguf file"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / name)


def test_a_missing_tokenizer_is_named(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load(checkpoint)


def test_a_gguf_is_converted_beside_itself_once_and_again_when_it_changes(tmp_path, capsys):
    source = tmp_path / "model.gguf"
    shutil.copy(SMALL, source)
    model = load(source)
    assert model.directory == tmp_path / "model"
    assert "converting model.gguf to" in capsys.readouterr().err
    assert load(source).hash == model.hash
    os.utime(source)
    assert checkpoint_of(source) == model.directory
    assert capsys.readouterr().err == ""
    shutil.copy(DATA / "q4_1.gguf", source)
    assert load(source).config != model.config
    assert "again: the file or the format has changed" in capsys.readouterr().err


def test_a_checkpoint_of_an_older_version_beside_its_gguf_is_made_again(tmp_path):
    source = tmp_path / "model.gguf"
    shutil.copy(SMALL, source)
    directory = checkpoint_of(source)
    rewrite(directory, version=0)
    assert read_config(checkpoint_of(source)).tensors


@pytest.mark.parametrize("damage", ["bits", "missing", "tokenizer", "tokenizer gone"])
def test_a_damaged_checkpoint_of_a_gguf_is_made_again(tmp_path, capsys, damage):
    source = tmp_path / "model.gguf"
    shutil.copy(SMALL, source)
    whole = load(source)
    path = largest_file(whole.directory, "token_embd")
    if damage == "bits":
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    elif damage == "missing":
        shutil.rmtree(path.parent)
    elif damage == "tokenizer":
        (whole.directory / "tokenizer.json").write_text("{")
    else:
        (whole.directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="convert the model again"):
        load(whole.directory)
    capsys.readouterr()
    again = load(source)
    assert again.hash == whole.hash
    said = capsys.readouterr().err
    assert (
        "convert the model again: doing that with model.gguf" in said
        and said.count("openjet-jax:") == 1
    )
    jax.tree.map(np.testing.assert_array_equal, again.weights, whole.weights)


def test_what_is_left_of_a_checkpoint_in_the_users_cache_is_made_again(home):
    directory = checkpoint_of("tiny")
    (directory / "config.json").unlink()
    assert checkpoint_of("tiny") == directory
    assert read_config(directory).tensors


def test_converting_again_keeps_a_counted_list_or_says_that_it_is_dropped(tmp_path, capsys):
    source, other = (tmp_path / name for name in ("model.gguf", "other.gguf"))
    shutil.copy(DATA / "q8_0.gguf", source)
    directory = checkpoint_of(source)
    vocab = load_tokenizer(directory).vocab_used
    counted = DraftList(ids=np.arange(20, dtype=np.int32), head="same", counted=30, covered=25)
    write_list(directory, read_config(directory).hash, counted)
    os.utime(source)
    capsys.readouterr()
    convert_gguf(source, directory, force=True, quiet=True)
    assert "is kept: 20 listed tokens" in capsys.readouterr().err
    kept = read_list(directory, read_config(directory).hash, vocab)
    assert kept is not None and str(kept) == str(counted)
    assert kept.ids is not None and kept.ids.tolist() == list(range(20))
    shutil.copy(located("tiny"), other)
    convert_gguf(other, directory, force=True, quiet=True)
    said = capsys.readouterr().err
    assert "is dropped (the tokenizer is another one)" in said and "draft-vocab" in said
    assert not (directory / "draft_vocabulary.json").exists()


def test_what_is_in_the_way_of_a_checkpoint_is_not_touched(tmp_path):
    source = tmp_path / "model.gguf"
    shutil.copy(SMALL, source)
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="in the way"):
        load(source)
    assert (tmp_path / "model").exists()


def test_beside_a_file_in_a_folder_that_cannot_be_written_the_users_cache_is_used(
    tmp_path, home, monkeypatch
):
    source = tmp_path / "model.gguf"
    shutil.copy(SMALL, source)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    directory = checkpoint_of(source)
    assert directory.is_relative_to(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert checkpoint_of(source) == directory


def test_tiny_is_the_bundled_model_kept_in_the_users_cache(home, capsys):
    model = load("tiny")
    assert model.directory.is_relative_to(home)
    assert model.config.has_mtp and model.config.vocab == 8192
    assert model.facts["license"] == "apache-2.0"
    assert "converting" in capsys.readouterr().err
    assert checkpoint_of("tiny") == model.directory
    assert capsys.readouterr().err == ""
    ids = model.render([{"role": "user", "content": "Hello"}])
    assert "Hello" in model.tokenizer.decode(ids)


def test_tokenizer_and_template_of_a_gguf_are_read_without_converting_it(checkpoint, home):
    tokenizer = load_tokenizer("tiny")
    assert tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"
    assert "role" in load_template("tiny").source
    assert not (home / "checkpoints").exists()
    (checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load_template(checkpoint)
    assert load_tokenizer(checkpoint).vocab_size == load_tokenizer(SMALL).vocab_size


def test_inspecting_a_gguf_says_the_same_as_inspecting_its_checkpoint(original):
    of_file, of_checkpoint = inspect(SMALL, context=64), inspect(original, context=64)
    differing = {key for key in of_file if of_file[key] != of_checkpoint[key]}
    assert differing == {"path", "kind", "hash", "sources"}
    json.dumps(of_file)
    assert len(of_file["tensors"]) == len(read_config(original).tensors)
    text = render(of_file)
    assert "DeltaNet" in text and "iq4_nl" in text and "total" in text
    with pytest.raises(ValueError, match="context"):
        inspect(SMALL, context=10**9)


def test_inspecting_verifies_every_byte_of_a_checkpoint_when_asked(original):
    facts = inspect(original, verify=True)
    assert facts["verified_bytes"] == read_config(original).nbytes
    assert "as written" in render(facts) and "as written" not in render(inspect(original))
    with pytest.raises(ValueError, match="has no checksums to verify; convert it"):
        inspect(SMALL, verify=True)


def test_the_memory_plan_counts_the_bytes_that_weights_and_state_have(original):
    config, weights = load_weights(original)
    decode = DecodeConfig(context=100, kv_dtype="bfloat16")
    plan = memory_plan(config, read_config(original).tensors, decode)
    assert sum(plan.weights.values()) == nbytes(weights)
    state = initial_state(config, decode)
    parts = (plan.kv, plan.mtp_kv, plan.recurrent, plan.other_state)
    assert sum(parts) == nbytes(state)
    longer = memory_plan(config, read_config(original).tensors, DecodeConfig(context=100_000))
    assert longer.kv > plan.kv and longer.recurrent == plan.recurrent
    positions = state.kv.k.shape[1]
    assert plan.kv_position * positions == plan.kv + plan.mtp_kv
    assert "draft head" not in plan.weights


def test_the_memory_plan_counts_the_draft_head_of_a_large_vocabulary(original):
    tensors = read_config(original).tensors
    config = dataclasses.replace(read_config(original).model, vocab=65_536, vocab_used=60_000)
    plan = memory_plan(config, tensors, DecodeConfig(context=100))
    head = next(tensor.nbytes for tensor in tensors if tensor.field == "head")
    assert plan.weights["draft head"] == pytest.approx(head / 2, rel=0.01)


def nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_a_loaded_stack_is_the_memory_it_was_read_into(original, monkeypatch):
    made: list[np.ndarray] = []
    empty = stacks._empty

    def remembered(shape, dtype):
        made.append(empty(shape, dtype))
        return made[-1]

    monkeypatch.setattr(stacks, "_empty", remembered)
    _, weights = load_weights(original)
    leaves = jax.tree.leaves(weights)
    assert len(leaves) == len(made)
    for leaf, memory in zip(leaves, made, strict=True):
        assert leaf.unsafe_buffer_pointer() == memory.ctypes.data
