"""The peer of transformers has a file's sizes, and is measured in an interpreter of its own."""

import argparse
import importlib.util
import json
import math
import pathlib
import stat
import sys
from typing import Any

import pytest

import openjet_jax as oj
from bench import decode
from bench.peers import transformers
from bench.peers.transformers import measured_by, sizes_in, sizes_of
from bench.synthetic_gguf import published, resized, write
from bench.synthetic_tensors import tensors

SMALL = resized(
    published("27B")[0],
    num_layers=8,
    hidden=256,
    ffn=512,
    vocab=512,
    heads=4,
    kv_heads=2,
    head_width=64,
    rotary=32,
    key_heads=2,
    value_heads=4,
    gdn_width=64,
)
HAS_TORCH = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
RATE = {"value": 20.0, "low": 19.0, "high": 21.0, "count": 3}
STUB = """#!{python}
import json, sys
assert sys.argv[1:3] == ["-m", "bench.peers.transformers"], sys.argv
at = {{name: sys.argv.index(name) for name in ("--contexts", "--tokens", "--runs")}}
if sys.argv[at["--tokens"] + 1] == "13":
    sys.exit("unlucky")
sizes = json.load(open(sys.argv[3]))
contexts = [int(x) for x in sys.argv[at["--contexts"] + 1 : at["--tokens"]]]
rows = [{{"context": x, "depth": 0, "rate": {rate}, "same_tokens": True}} for x in contexts]
print("read by people")
print(json.dumps({{"rows": rows, "sizes": sizes, "compiled": "--compiled" in sys.argv}}))
"""


@pytest.fixture
def python(tmp_path: pathlib.Path) -> str:
    """A program that stands in for an interpreter which has transformers."""
    path = tmp_path / "python"
    path.write_text(STUB.format(python=sys.executable, rate=RATE))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("tied", [False, True])
def test_as_many_parameters_as_the_file_has(tmp_path: pathlib.Path, tied: bool):
    counts = {t.name: math.prod(t.shape) for t in tensors(SMALL, tied)}
    trunk = sum(n for name, n in counts.items() if not name.startswith(f"blk.{SMALL.num_layers}."))
    assert sizes_of(SMALL, tied)["parameters"] == trunk
    path = tmp_path / "small.gguf"
    write(path, SMALL, tied=tied)
    found = sizes_in(path)
    assert found["parameters"] == trunk
    assert found["settings"]["tie_word_embeddings"] is tied
    (tmp_path / "sizes.json").write_text(json.dumps(found))
    assert sizes_in(tmp_path / "sizes.json") == found


def test_the_27b_has_its_published_sizes():
    config, tied = published("27B")
    found = sizes_of(config, tied)
    settings, kinds = found["settings"], found["settings"]["layer_types"]
    assert (settings["hidden_size"], settings["intermediate_size"]) == (5120, 17408)
    assert (settings["num_attention_heads"], settings["num_key_value_heads"]) == (24, 4)
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (48, 16)
    assert settings["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert settings["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert round(found["parameters"] / 1e9, 1) == 26.9
    with pytest.raises(ValueError, match="qwen35 alone"):
        sizes_of(argparse.Namespace(architecture="qwen4exp", hidden=1), tied)


@pytest.mark.skipif(bool(HAS_TORCH), reason="PyTorch and transformers are installed")
def test_what_is_missing_is_said(tmp_path: pathlib.Path, monkeypatch, capsys):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(sizes_of(SMALL, False)))
    monkeypatch.setattr(sys, "argv", ["transformers", str(path)])
    assert transformers.main() == 1
    assert "pip install --upgrade torch transformers" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch and transformers")
def test_it_decodes_the_same_tokens_again():
    peer = transformers.Peer(sizes_of(SMALL, False), device="cpu")
    found = transformers.measure(peer, [16, 24], tokens=4, runs=2, prompt=32)
    assert [row["context"] for row in found["rows"]] == [16, 24]
    assert all(row["same_tokens"] and row["rate"]["value"] > 0 for row in found["rows"])
    assert found["prefill"]["rate"]["value"] > 0 and found["versions"]["torch"]


def test_another_interpreter_measures(python: str):
    sizes = sizes_of(SMALL, False)
    found = measured_by(python, sizes, [64, 128], tokens=8, runs=3)
    assert found["sizes"] == sizes and not found["compiled"]
    assert [(row["context"], row["rate"]) for row in found["rows"]] == [(64, RATE), (128, RATE)]
    assert measured_by(python, sizes, [64], tokens=8, runs=3, compiled=True)["compiled"]
    with pytest.raises(RuntimeError, match="unlucky"):
        measured_by(python, sizes, [64], tokens=13, runs=3)
    with pytest.raises(RuntimeError, match="No such file or directory; give an interpreter"):
        measured_by(f"{python}-absent", sizes, [64], tokens=8, runs=3)


def test_a_figures_peer_is_the_faster_one(python: str):
    model = oj.load("tiny")
    settings = {"contexts": [64, 128], "peer_tokens": 8, "runs": 3, "compiled": True}
    args: Any = argparse.Namespace(**settings, transformers=python)
    theirs = decode.beside_transformers(model, args)
    assert {row["engine"] for row in theirs} == {"transformers"} and theirs[0]["compiled"]
    assert theirs[0]["sizes"] == sizes_of(model.config, tied=False)
    others = [{"context": 64, "depth": 0, "rate": {**RATE, "value": 30.0}}]
    plain = [{"context": at, "plain": {"value": 60.0}} for at in (64, 128)]
    rows = {"contexts": plain, "depths": []}
    found = decode.figures(rows, [*others, *theirs], "", {})
    assert [(each.name, each.peer) for each in found] == [("plain_64", 30.0), ("plain_128", 20.0)]
