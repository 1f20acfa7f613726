"""Saved sessions: they go on bit for bit, and nothing else than a sound file of this model does."""

import dataclasses
import fcntl
import functools
import hashlib
import json
import pathlib
import signal
import stat
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from golden import CACHE, DECODE
from sessions import BOTH, PENALISED, answer, assert_same_bits, fresh, model, session, text

import openjet_jax as oj
from openjet_jax.compiled import Programs
from openjet_jax.config import DecodeConfig
from openjet_jax.program_store import ProgramStore
from openjet_jax.session_format import PREAMBLE, VERSION, Header

SAMPLINGS = pytest.mark.parametrize(
    "sampling", [oj.Sampling(), PENALISED], ids=["greedy", "penalised"]
)


@functools.cache
def saved_session(folder: pathlib.Path, architecture: str) -> tuple[oj.Session, pathlib.Path]:
    """A session of three turns in the middle of an answer, and its file."""
    ours = session(architecture)
    for seed in range(2):
        ours.append(text(40, seed=seed))
        answer(ours, 9)
    ours.append([1, 2, 3])
    answer(ours, 9, sampling=PENALISED)
    path = folder / architecture / "a.session"
    path.parent.mkdir()
    ours.save(path)
    return ours, path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def saved(folder) -> tuple[oj.Session, pathlib.Path]:
    return saved_session(folder, "qwen35")


def refusal(path: pathlib.Path, **settings) -> str:
    with pytest.raises(oj.SessionFileError) as error:
        oj.Session.restore(model(), path, **settings)
    assert str(path) in str(error.value)
    return str(error.value)


def rewritten(content: bytes, **changes) -> bytes:
    """A file whose header is sound in itself but says something else."""
    size = PREAMBLE.unpack_from(content)[2]
    header = json.loads(content[PREAMBLE.size : PREAMBLE.size + size]) | changes
    new = json.dumps(header, sort_keys=True).encode()
    preamble = PREAMBLE.pack(b"OJETSESS", VERSION, len(new), hashlib.sha256(new).digest())
    return preamble + new + content[PREAMBLE.size + size :]


@BOTH
@SAMPLINGS
def test_a_restored_session_goes_on_bit_for_bit(folder, architecture, sampling):
    ours, path = saved_session(folder, architecture)
    ours, theirs = ours.fork(), oj.Session.restore(model(architecture), path)
    assert theirs.ids == ours.ids and theirs.inspect().unread == 0
    more = [
        each.generate(
            max_new_tokens=20, continued=True, sampling=sampling, ignore_eos=True, depth=5
        )
        for each in (ours, theirs)
    ]
    assert more[0].token_ids.tolist() == more[1].token_ids.tolist()
    assert more[0].logprobs.tobytes() == more[1].logprobs.tobytes()
    for each in (ours, theirs):
        each.append([4])
        assert each.read().reused == len(ours.ids) - 1
    assert_same_bits(ours, theirs)


def test_an_answer_cut_by_a_restart_is_the_answer_in_one(tmp_path):
    ours = session()
    ours.append(text(60))
    whole = answer(ours.fork(), 40, sampling=PENALISED)
    first = answer(ours, 17, sampling=PENALISED)
    ours.save(tmp_path / "a")
    theirs = oj.Session.restore(model(), tmp_path / "a", checkpoint_every=32)
    assert [*first, *answer(theirs, 23, sampling=PENALISED, continued=True)] == whole


def test_checkpoints_are_restored_and_serve_an_edit(saved):
    ours, theirs = saved[0].fork(), oj.Session.restore(model(), saved[1], checkpoint_every=32)
    facts = [
        [dataclasses.replace(f, place="host") for f in each.inspect().checkpoints]
        for each in (ours, theirs)
    ]
    assert facts[0] == facts[1] and len(facts[0]) >= 4
    edited = [*ours.ids[:70], 5, *ours.ids[70:]]
    nearest = max(f.position for f in facts[0] if f.position <= 70)
    for each in (ours, theirs):
        each.replace(edited)
        assert each.read().reused == nearest > 38
    assert_same_bits(ours, theirs)
    assert answer(theirs) == fresh(edited)


def test_a_text_of_several_blocks_passes_through_a_file_and_the_prefix_cache(tmp_path):
    cache = oj.PrefixCache()
    long = {"context": 700, "prefixes": cache, "isolation_key": "a"}
    ours, ids = long_session(**long), text(600)
    ours.append(ids)
    ours.read()
    ours.save(tmp_path / "a")
    ours.publish()
    adopted = long_session(**long)
    restored = oj.Session.restore(model(), tmp_path / "a")
    for each in (adopted, ours, restored):
        each.replace([*ids, *text(50, seed=1)])
        each.read()
    assert adopted.reuse == oj.Reuse(reused=599, read=51, shared=599)
    assert restored.reuse == oj.Reuse(reused=600, read=50)
    assert_same_bits(ours, restored)
    assert_same_bits(ours, adopted)


def long_session(**settings) -> oj.Session:
    """A session of more than one block; it only reads, so that few programs are compiled."""
    decode = dataclasses.replace(DECODE, context=settings["context"])
    programs = Programs(model().config, decode, model().weights, ProgramStore(CACHE))
    model().programs.setdefault(DecodeConfig(context=decode.context), programs)
    return oj.Session(model(), **settings)


def test_unread_tokens_empty_sessions_and_overshot_stops_are_saved_as_they_are(tmp_path):
    empty, unread, overshot = session(), session(), session()
    unread.append(text(20))
    overshot.append(text(60))
    whole = answer(overshot.fork(), 30)
    overshot._ids += whole[:5]  # as a stop string leaves it
    overshot._memory.conversation.read([*text(60), *whole])
    for i, ours in enumerate((empty, unread, overshot)):
        ours.save(tmp_path / str(i))
        theirs = oj.Session.restore(model(), tmp_path / str(i))
        assert theirs.ids == ours.ids
        theirs.append([7])
        assert answer(theirs, 8) == fresh([*ours.ids, 7], 8)


def test_a_file_is_its_owners_alone_and_nothing_else_is_left(saved, tmp_path):
    path = tmp_path / "a.session"
    path.write_bytes(b"old")
    path.chmod(0o644)
    saved[0].save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_longer_context_is_fine_and_a_shorter_one_refused(saved):
    assert "do not fit context=100; ask for a larger" in refusal(saved[1], context=100)
    assert oj.Session.restore(model(), saved[1], context=None).inspect().context == 200


def test_a_file_of_another_model_version_or_kind_is_refused_with_the_reason(saved, tmp_path):
    ours, path = saved
    other = dataclasses.replace(model(), hash="0" * 64)
    with pytest.raises(oj.SessionFileError, match="saved from the model .* load that one"):
        oj.Session.restore(other, path)
    content, bad = path.read_bytes(), tmp_path / "bad"
    cases = {
        "version 7; this program reads 1": content[:8] + b"\x07" + content[9:],
        "not a session's file": b"GGUF" + content[4:],
        "cut or damaged": content[:-1],
        "bytes, not": content + b"\0",
        "not a count": rewritten(content, known=-1),
        "contradict": rewritten(content, history=300),
        "is unknown": rewritten(content, kv_dtype="q4"),
        "out of place": rewritten(content, checkpoints=[[5, "prompt"], [3, "prompt"]]),
        "of kind": rewritten(content, checkpoints=[[5, "x"]]),
        "cannot be read": rewritten(content, extra=1),
        "is not a hash": rewritten(content, model=1),
    }
    for reason, wrong in cases.items():
        bad.write_bytes(wrong)
        assert reason in refusal(bad), reason
    for wrong in (rewritten(content, known=2**30, context=2**30), rewritten(content, known=5)):
        bad.write_bytes(wrong)
        refusal(bad)
    assert "not a regular file" in refusal(pathlib.Path("/dev/null"))
    with pytest.raises(FileNotFoundError):
        oj.Session.restore(model(), tmp_path / "none")


def test_an_id_outside_the_vocabulary_and_a_wild_count_are_refused(saved, tmp_path):
    ours = saved[0].fork()
    path = tmp_path / "a"
    ours._ids[3] = 288
    ours.save(path)
    assert "outside 0..287" in refusal(path)


def test_a_thousand_damaged_files_are_refused_without_a_crash_or_a_large_allocation(
    saved, tmp_path
):
    content, path = saved[1].read_bytes(), tmp_path / "bad"
    random = np.random.default_rng(7)
    header = PREAMBLE.size + PREAMBLE.unpack_from(content)[2]
    refusal_of_warmup = tmp_path / "warm"
    refusal_of_warmup.write_bytes(content[:-1])
    refusal(refusal_of_warmup)
    tracemalloc.start()
    try:
        for i in range(1000):
            damaged = bytearray(content)
            at = int(random.integers(header if i % 2 else len(content)))
            match i % 5:
                case 0 | 1:
                    damaged[at] ^= 1 << int(random.integers(8))
                case 2:
                    del damaged[at:]
                case 3:
                    end = min(at + int(random.integers(1, 64)), len(damaged))
                    damaged[at:end] = bytes(b ^ 0xFF for b in damaged[at:end])
                case 4:
                    damaged[at:at] = random.bytes(int(random.integers(1, 64)))
            path.write_bytes(damaged)
            del damaged
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(oj.SessionFileError):
                oj.Session.restore(model(), path)
            assert tracemalloc.get_traced_memory()[1] - before < 3 << 20
    finally:
        tracemalloc.stop()


def test_two_processes_do_not_save_to_one_file_at_once(saved, tmp_path):
    path = tmp_path / "a"
    saved[0].save(path)
    with open(tmp_path / ".a.partial", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another process is saving"):
            saved[0].save(path)
    saved[0].save(path)  # what a killed process left is no hindrance
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_failed_saving_leaves_the_old_file_and_no_other(saved, tmp_path, monkeypatch):
    path = tmp_path / "a"
    saved[0].save(path)
    before = path.read_bytes()
    monkeypatch.setattr(Header, "pack", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        saved[0].save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


SAVER = """
import sys
sys.path[:0] = {paths!r}
from sessions import session, text
both = []
for seed in (1, 2):
    ours = session()
    ours.append(text(150, seed=seed))
    ours.read()
    both.append(ours)
both[0].save({path!r})
print("ready", flush=True)
while True:
    for ours in reversed(both):
        ours.save({path!r})
"""


def killed_while_saving(path: pathlib.Path, times: int, seed: int) -> list[int]:
    """Kills a process that saves two sessions by turns; returns which one each kill left."""
    root, left = pathlib.Path(__file__).parents[2], []
    code = SAVER.format(paths=[str(root), str(root / "tests" / "engine")], path=str(path))
    for wait in np.random.default_rng(seed).uniform(0.0, 0.05, times):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process, process.stdout:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
        theirs = oj.Session.restore(model(), path)
        left.append([text(150, seed=1), text(150, seed=2)].index(list(theirs.ids)))
        theirs.append([9])
        assert theirs.read().reused == 150
    return left


def test_a_process_killed_while_saving_leaves_a_whole_session(tmp_path):
    killed_while_saving(tmp_path / "a", times=1, seed=0)
