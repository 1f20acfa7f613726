"""Broken files all the way: converted, loaded and scored, or refused; never anything else."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import openjet_jax as oj
from openjet_jax.checkpoint import is_checkpoint
from tests.convert.gguf_cases import EXPECTED, MALFORMED, behaves, mutations

pytestmark = pytest.mark.xdist_group("malformed")

ROOT = pathlib.Path(__file__).parents[2]
WARM = ("valid", "valid_mtp", "tensor_type_mxfp4")
"""Sound files of every set of shapes: scored first, so that no later file waits for a compiler."""

NUM_MUTATIONS = 200

MEASURE = """
import json, resource, sys, time
import openjet_jax as oj

def outcome(path):
    start = time.monotonic()
    try:
        logits = oj.score(oj.load(path), range(5))["logits"]
        message = None if abs(logits).max() < 1e30 else "not finite"
    except (ValueError, OSError) as error:
        message = str(error)
    return {"message": message, "seconds": time.monotonic() - start}

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

num_warm, paths = int(sys.argv[1]), sys.argv[2:]
found = [outcome(path) for path in paths[:num_warm]]
idle = peak_mib()
found += [outcome(path) for path in paths[num_warm:]]
print(json.dumps({"outcomes": found, "extra_mib": peak_mib() - idle}))
"""


@dataclasses.dataclass(frozen=True)
class Broken:
    """A folder with the malformed files of an architecture, and mutations of its two sound ones."""

    architecture: str
    folder: pathlib.Path

    @property
    def expected(self) -> dict:
        return EXPECTED[self.architecture]


@pytest.fixture(scope="module", params=MALFORMED)
def broken(request, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    architecture, source = request.param, MALFORMED[request.param]
    folder = tmp_path_factory.mktemp(architecture)
    for case in EXPECTED[architecture]["files"]:
        shutil.copy(source / case["file"], folder)
    for name in ("b00.gguf", "b01.gguf"):
        content = (source / name).read_bytes()
        for i, (_, changed) in enumerate(mutations(content, NUM_MUTATIONS // 2)):
            (folder / f"mutation-{i}-{name}").write_bytes(changed)
    return Broken(architecture, folder)


@pytest.fixture(scope="module")
def measured(broken: Broken) -> dict:
    """What became of every file in one process, by file name, and the memory that they took."""
    folder = broken.folder
    warm = [case["file"] for case in broken.expected["files"] if case["name"] in WARM]
    rest = sorted(path.name for path in folder.glob("*.gguf") if path.name not in warm)
    paths = [str(folder / name) for name in (*warm, *rest)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", MEASURE, str(len(warm)), *paths],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    outcomes = dict(zip((*warm, *rest), found["outcomes"], strict=True))
    return found | {"outcomes": outcomes, "waited": [outcomes[name]["seconds"] for name in rest]}


def test_every_file_gives_finite_logits_or_a_message_that_names_the_cause(measured, broken):
    wrong = []
    for case in broken.expected["files"]:
        message = measured["outcomes"][case["file"]]["message"]
        if message == "not finite" or not behaves(case, broken.folder / case["file"], message):
            wrong.append((case["name"], message))
    assert not wrong


def test_every_mutation_gives_finite_logits_or_a_message(measured):
    found = {name: out for name, out in measured["outcomes"].items() if "mutation" in name}
    assert len(found) == NUM_MUTATIONS
    messages = [out["message"] for out in found.values()]
    assert 0 < messages.count(None) < len(found)
    assert "not finite" not in messages
    assert all(5 < len(message) < 1000 for message in messages if message is not None)


def test_a_file_that_is_refused_leaves_no_part_of_a_checkpoint(measured, broken):
    sound = {
        name.removesuffix(".gguf")
        for name, out in measured["outcomes"].items()
        if out["message"] is None or "logits are not finite" in out["message"]
    }
    left = {path.name for path in broken.folder.iterdir() if path.is_dir()}
    assert left == sound
    assert all(is_checkpoint(broken.folder / name) for name in left)


def test_no_file_takes_long_or_much_memory(measured, broken):
    assert max(measured["waited"]) < broken.expected["limits"]["seconds"]
    assert measured["extra_mib"] < broken.expected["limits"]["extra_mib"]


@pytest.mark.parametrize("name", ["mtp_key_only", "mtp_part"])
@pytest.mark.parametrize("broken", ["qwen35"], indirect=True)
def test_drafts_are_refused_where_the_mtp_block_is_incomplete(broken, name):
    (case,) = (case for case in broken.expected["files"] if case["name"] == name)
    model = oj.load(broken.folder / case["file"])
    with pytest.raises(ValueError) as caught:
        oj.generate(model, [1, 2], depth=1)
    assert any(word in str(caught.value).lower() for word in case["mention"])
    with pytest.raises(ValueError, match="mtp_logits"):
        oj.score(model, [1, 2, 3], mtp=True)
