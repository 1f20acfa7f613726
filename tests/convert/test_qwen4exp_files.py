"""qwen4exp files keep their values; the n-gram table is mapped, sized and checked."""

import pathlib
import shutil

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_cases import MALFORMED

from openjet_jax import stacks
from openjet_jax.checkpoint import CheckpointError, read_config
from openjet_jax.config import Qwen4ExpConfig
from openjet_jax.convert.model_file import read_model
from openjet_jax.convert.pipeline import convert_gguf
from openjet_jax.leaf_files import verify
from openjet_jax.qwen4exp_weights import Qwen4ExpWeights
from openjet_jax.row_tables import rows_path
from openjet_jax.stacks import load_weights

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "golden_qwen4exp"
SHARED = ROOT.parent / "shared" / "golden" / "qwen4exp"
SOUND = MALFORMED["qwen4exp"] / "b00.gguf"


def sources() -> list[pathlib.Path]:
    return sorted((SHARED if SHARED.exists() else DATA).glob("*.gguf"))


@pytest.fixture(scope="module", params=sources(), ids=lambda path: path.stem)
def converted(request, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / request.param.stem
    return request.param, convert_gguf(request.param, target, quiet=True)


def test_experts_are_stacked_by_rows_and_the_table_is_a_file_of_packed_rows(converted):
    path, target = converted
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def values(name: str) -> np.ndarray:
        tensor = tensors[name]
        flat = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(flat, np.float32).reshape(tuple(reversed(tensor.shape.tolist())))

    config, weights = load_weights(target)
    assert isinstance(config, Qwen4ExpConfig) and isinstance(weights, Qwen4ExpWeights)
    table, ids = (
        values("per_layer_token_embd.weight"),
        np.asarray([0, 3, config.ngram_rows - 1], np.int64),
    )
    assert np.array_equal(weights.ngrams.table.take(jnp.asarray(ids)), table[ids])
    plane = weights.ngrams.table.rows
    assert rows_path(target, "per_layer_token_embd").stat().st_size == plane.size
    fused = "blk.0.ffn_gate_up_exps.weight"
    if fused in tensors:
        gate, up = np.split(values(fused), 2, axis=1)
    else:
        gate, up = values("blk.0.ffn_gate_exps.weight"), values("blk.0.ffn_up_exps.weight")
    for expert in (0, config.experts - 1):
        part = (jnp.int32(expert), config.expert_ffn)
        assert np.array_equal(weights.experts.gate.dense(0, part), gate[expert])
        assert np.array_equal(weights.experts.up.dense(0, part), up[expert])
        down = weights.experts.down.dense(0, (jnp.int32(expert), config.hidden))
        assert np.array_equal(down, values("blk.0.ffn_down_exps.weight")[expert])


def test_on_a_cpu_the_table_is_the_mapped_file_itself(converted):
    _, target = converted
    _, weights = load_weights(target)
    assert isinstance(weights, Qwen4ExpWeights)
    array = np.asarray(weights.ngrams.table.rows)
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    address, file = array.ctypes.data, str(rows_path(target, "per_layer_token_embd"))
    spans = [line.split() for line in maps.read_text().splitlines() if line.endswith(file)]
    bounds = [tuple(int(end, 16) for end in span[0].split("-")) for span in spans]
    assert any(start <= address < stop for start, stop in bounds)


def test_a_cut_table_is_refused_by_its_size(converted, tmp_path):
    _, target = converted
    copy = shutil.copytree(target, tmp_path / "copy")
    path = rows_path(copy, "per_layer_token_embd")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes where"):
        load_weights(copy)


def test_a_damaged_table_is_found_at_loading_where_it_is_small_and_always_by_verifying(
    converted, tmp_path, monkeypatch
):
    _, target = converted
    assert verify(target) == read_config(target).nbytes
    copy = shutil.copytree(target, tmp_path / "copy")
    path = rows_path(copy, "per_layer_token_embd")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for reader in (load_weights, verify):
        with pytest.raises(CheckpointError, match=r"per_layer_token_embd.*checksum differs"):
            reader(copy)
    monkeypatch.setattr(stacks, "CHECKED_TABLE_BYTES", 0)
    load_weights(copy)  # a large table is only mapped


def test_a_checkpoint_names_its_architecture_and_gives_the_same_configuration(converted):
    path, target = converted
    assert '"architecture": "qwen4exp"' in (target / "config.json").read_text()
    config = read_config(target).model
    assert config == read_model(path).config and hash(config)


def test_other_hash_constants_are_used_and_noted(tmp_path):
    content = SOUND.read_bytes()
    model = read_model(SOUND)
    assert isinstance(model.config, Qwen4ExpConfig) and not model.notes
    multiplier = model.config.ngram_multipliers[1]
    path = tmp_path / "other.gguf"
    old, new = (m.to_bytes(8, "little") for m in (multiplier, multiplier - 2))
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    changed = read_model(path)
    assert isinstance(changed.config, Qwen4ExpConfig)
    assert changed.config.ngram_multipliers[1] == multiplier - 2
    assert "hash constants" in changed.notes[0]
