"""A GGUF file becomes a checkpoint with the same values, whole or not at all."""

import pathlib

import gguf
import jax
import numpy as np
import pytest

from openjet_jax.checkpoint import CheckpointConfig, TensorEntry, read_config
from openjet_jax.convert.pipeline import convert_gguf
from openjet_jax.stacks import load_weights
from openjet_jax.weights import Packed, Weights
from pallas_kernels.formats import FORMATS

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "golden"
SHARED = ROOT.parent / "shared" / "golden" / "qwen35"
SMALL = DATA / "q4_1.gguf"


def convert(source: pathlib.Path, target: pathlib.Path, force: bool = False) -> pathlib.Path:
    return convert_gguf(source, target, force=force, quiet=True)


def values(weights: Weights, config: CheckpointConfig) -> dict[tuple[str, str], np.ndarray]:
    """Returns the float32 values of every tensor of a loaded model by name and field."""
    packed: dict[tuple[str, int], list[tuple[TensorEntry, dict[str, np.ndarray]]]] = {}
    found = {}
    for entry in config.tensors:
        leaf = weights
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
    return shared if shared else sorted(DATA.glob("*.gguf"))


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
