"""Broken files behave as `expected.json` says, and no damage leads to another exception."""

import json
import pathlib
import subprocess
import sys

import pytest
from gguf_cases import EXPECTED, MALFORMED, behaves, mutations
from hypothesis import given, settings
from hypothesis import strategies as st

from openjet_jax.convert.gguf import GGUFError, open_gguf
from openjet_jax.convert.model_file import read_model

NUM_MUTATIONS = 600
QWEN35 = MALFORMED["qwen35"]


def named(name: str) -> pathlib.Path:
    """Returns a malformed qwen35 file."""
    return QWEN35 / next(c["file"] for c in EXPECTED["qwen35"]["files"] if c["name"] == name)


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        pytest.param(architecture, case, id=f"{architecture}-{case['name']}")
        for architecture, expected in EXPECTED.items()
        for case in expected["files"]
    ],
)
def test_a_malformed_file_is_refused_by_its_cause_and_a_sound_one_is_read(architecture, case):
    path, message = MALFORMED[architecture] / case["file"], None
    try:
        model = read_model(path)
    except GGUFError as error:
        message = str(error)
        assert message.startswith(str(path))
    else:
        assert model.config.architecture == architecture
        assert all(source.data.nbytes == source.nbytes for source in model.sources)
        if not model.notes:
            assert model.config.has_mtp == case["mtp"]
    assert behaves(case, path, message), message


@pytest.mark.parametrize("name", ["mtp_key_only", "mtp_part"])
def test_an_incomplete_mtp_block_is_disregarded_with_a_note_that_names_what_is_missing(name: str):
    model = read_model(named(name))
    assert not model.config.has_mtp and model.config.num_layers == 2
    assert "blk.2" in model.notes[0] and "missing" in model.notes[0]


def test_the_last_block_with_nextn_tensors_is_no_layer_when_the_key_is_absent():
    model = read_model(named("mtp_key_gone"))
    assert model.config.num_layers == 2 and model.config.has_mtp
    assert "nextn_predict_layers is absent" in model.notes[0]


MEASURE = """
import json, pathlib, resource, sys, time
from openjet_jax.convert.gguf import GGUFError
from openjet_jax.convert.model_file import read_model
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slowest = 0.0
for path in sys.argv[1:]:
    start = time.monotonic()
    try:
        for source in read_model(path).sources:
            source.data.sum()
    except GGUFError:
        pass
    slowest = max(slowest, time.monotonic() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": slowest, "extra_mib": (peak - idle) / 1024}))
"""


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    folder = tmp_path_factory.mktemp("damaged")
    paths = []
    sources = [path / name for path in MALFORMED.values() for name in ("b00.gguf", "b01.gguf")]
    for kind, source in enumerate(sources):
        for i, (_, changed) in enumerate(mutations(source.read_bytes(), NUM_MUTATIONS // 4)):
            paths.append(folder / f"{kind}-{i}.gguf")
            paths[-1].write_bytes(changed)
    return paths


def test_a_damaged_file_is_read_or_refused_but_never_fails_otherwise(damaged: list[pathlib.Path]):
    refused = 0
    for path in damaged:
        try:
            model = read_model(path)
        except GGUFError as error:
            refused += 1
            assert str(error).startswith(str(path)) and len(str(error)) < 1000
        else:
            assert all(source.data.nbytes == source.nbytes for source in model.sources)
    assert NUM_MUTATIONS / 4 < refused < NUM_MUTATIONS


def test_no_malformed_or_damaged_file_takes_long_or_much_memory(damaged: list[pathlib.Path]):
    malformed = [path for folder in MALFORMED.values() for path in sorted(folder.glob("*.gguf"))]
    paths = [str(path) for path in (*malformed, *damaged)]
    command = [sys.executable, "-W", "error", "-c", MEASURE, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    for expected in EXPECTED.values():
        assert measured["seconds"] < expected["limits"]["seconds"]
        assert measured["extra_mib"] < expected["limits"]["extra_mib"]


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(content=st.binary(max_size=200), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_random_bytes_after_a_sound_start_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, counts: tuple[int, int]
):
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    start = b"GGUF" + (3).to_bytes(4, "little")
    path.write_bytes(start + b"".join(n.to_bytes(8, "little") for n in counts) + content)
    try:
        open_gguf(path)
    except GGUFError:
        pass
