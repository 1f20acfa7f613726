"""Conversations that last: turns, edits and files against reading everything again; killed saves.

    python -m bench.sessions [MODEL] [--tokens 4200] [--kills 100]

Gates: after a turn and after an edit the states agree with a fresh reading to 1e-5, a restored
session goes on with the same bits, and what a killed save left is the old session or the new one,
which goes on with the same bits too. The processes that are killed are forked from this one and
write two sessions by turns, from host memory, through the code that `Session.save` runs.
"""

import argparse
import dataclasses
import itertools
import mmap
import os
import pathlib
import signal
import struct
import tempfile
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

import openjet_jax as oj
from bench.summary import Figure, record
from openjet_jax.session_file import save_session

ROOT = pathlib.Path(__file__).parents[1]
SAMPLED = oj.Sampling(temperature=1.0, top_k=40, repetition_penalty=1.1, seed=3)


def source_text() -> str:
    """Returns the project's own source, as text to read."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "openjet_jax").glob("*.py")))


def first_token(session: oj.Session) -> float:
    """Returns seconds until an answer's first token; programs are ready."""
    start, stream = time.perf_counter(), session.stream(max_new_tokens=8, ignore_eos=True)
    next(stream)
    seconds = time.perf_counter() - start
    for _ in stream:
        pass
    return seconds


def parts(session: oj.Session) -> list[np.ndarray]:
    """Returns everything the committed positions left, once nothing is pending."""
    state = session._memory.conversation.state
    length, start = int(state.length), int(state.recurrent.start)
    history = session.model.config.history
    found = [
        state.recurrent.delta,
        state.recurrent.window[:, start : start + history],
        state.hidden,
        *(x[:, :length] for x in jax.tree.leaves(state.kv)),
        *(x[:, 1:length] for x in jax.tree.leaves(state.mtp_kv)),
    ]
    return [np.asarray(part, np.float64) for part in found]


def difference(ours: oj.Session, theirs: oj.Session) -> float:
    """Returns the largest relative RMS difference of the two states' parts."""
    pairs = zip(parts(ours), parts(theirs), strict=True)
    return max(float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))) for a, b in pairs)


def settled_difference(ours: oj.Session, theirs: oj.Session) -> float:
    """Returns `difference` after one token more, with which no row is pending; at most 1e-5."""
    for each in (ours, theirs):
        each.append([1])
        each.read()
    error = difference(ours, theirs)
    assert error < 1e-5, error
    return error


def read_afresh(model: oj.Model, ids: tuple[int, ...], context: int) -> tuple[oj.Session, float]:
    """Returns a session that read these ids from the beginning, and its seconds to a token."""
    session = oj.Session(model, context=context)
    session.append(ids)
    seconds = first_token(session)
    session.truncate(len(ids))
    return session, seconds


def warm_up(model: oj.Model, ids: list[int], context: int) -> None:
    """Makes every program ready by using it: reading, a turn, an edit, a copy, a file."""
    session, _ = read_afresh(model, tuple(ids), context)
    for text in ([*ids, *ids[:40]], [*ids[:300], *ids]):
        session.replace(text)
        first_token(session)
    session.generate(max_new_tokens=8, sampling=SAMPLED)
    session.fork().close()
    with tempfile.TemporaryDirectory() as folder:
        session.save(pathlib.Path(folder) / "a")
        oj.Session.restore(model, pathlib.Path(folder) / "a").close()
    session.close()


@dataclasses.dataclass(kw_only=True)
class Kills:
    """What killed processes left behind.

    Attributes:
      left: which of two sessions was in the file, for each kill.
      cut: how many kills left a half-written file beside it.
      saves: how many saves the processes had finished.
    """

    left: list[int]
    cut: int = 0
    saves: int = 0


def killed_saves(both: list[oj.Session], path: pathlib.Path, times: int) -> Kills:
    """Kills a process in the middle of saving, again and again, and restores what it left.

    Args:
      both: two sessions, told apart by their ids.
      path: the file that all of them write.
      times: processes to kill.

    Raises:
      SessionFileError: a kill left a broken file.
      AssertionError: a restored session went on with other bits than the saved one.
    """
    model, random = both[0].model, np.random.default_rng(0)
    ids = [session.ids for session in both]
    saves = [
        partial(save_session, path, model, _in_host_memory(each), list(each.ids), 0)
        for each in both
    ]
    expected = [continuation(session.fork()) for session in both]
    start = time.perf_counter()
    saves[0]()
    save_s, kills = time.perf_counter() - start, Kills(left=[])
    finished, parent = mmap.mmap(-1, 8), os.getpid()
    for _ in range(times):
        child = os.fork()
        if child == 0:
            _save_by_turns(saves, finished, parent)
        time.sleep(random.uniform(0, 4 * save_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills.cut += path.with_name(f".{path.name}.partial").exists()
        restored = oj.Session.restore(model, path)
        kills.left.append(ids.index(restored.ids))
        assert continuation(restored) == expected[kills.left[-1]]
        restored.close()
    (kills.saves,) = struct.unpack("q", finished)
    return kills


def continuation(session: oj.Session) -> tuple[list[int], bytes]:
    """Returns the tokens a session goes on with, and the bits of their log-probabilities."""
    answer = session.generate(max_new_tokens=8, sampling=SAMPLED, ignore_eos=True)
    return answer.token_ids.tolist(), answer.logprobs.tobytes()


def _save_by_turns(saves: list[Callable[[], None]], finished: mmap.mmap, parent: int) -> NoReturn:
    """Saves until it is killed, or left alone by the process it was forked from; counts saves."""
    try:
        for save in itertools.cycle(reversed(saves)):
            save()
            finished[:] = struct.pack("q", struct.unpack("q", finished)[0] + 1)
            if os.getppid() != parent:
                break
    finally:
        os._exit(1)


def _in_host_memory(session: oj.Session) -> Any:
    """Returns what saving needs of a session's memory, where a forked process can use it."""
    conversation = session._memory.conversation
    blocks = [conversation.read_block(i) for i in range(-(-conversation.length // 256))]
    checkpoint = jax.device_get(conversation.checkpoint())
    stand_in = types.SimpleNamespace(
        decode=conversation.decode,
        ids=conversation.ids,
        length=conversation.length,
        read_block=blocks.__getitem__,
        checkpoint=lambda: checkpoint,
    )
    kept = {f.position: f for f in session.inspect().checkpoints}
    peek = {p: jax.device_get(session._memory.checkpoints.peek(p)) for p in kept}
    store = types.SimpleNamespace(
        facts=tuple(kept.values()), positions=tuple(kept), peek=peek.__getitem__
    )
    return types.SimpleNamespace(conversation=stand_in, checkpoints=store)


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time turns, edits, files and killed saves.")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--tokens", type=int, default=4200)
    parser.add_argument("--kills", type=int, default=100)
    args = parser.parse_args()
    model = oj.load(args.model)
    context = min(model.config.context, args.tokens + 512)
    ids = model.tokenizer.encode(source_text())[: args.tokens]
    assert len(ids) == args.tokens, "the model's context or the source is too short"
    warm_up(model, ids[:700], context)

    ours = oj.Session(model, context=context)
    ours.append(ids)
    first_token(ours)
    ours.append(ids[:40])
    turn_s = first_token(ours)
    turn = ours.reuse
    ours.truncate(len(ours.ids) - 8)
    theirs, again_s = read_afresh(model, ours.ids, context)
    turn_error = settled_difference(ours.fork(), theirs)

    half = len(ours.ids) // 2
    ours.replace([*ours.ids[:half], *ids[:20], *ours.ids[half:]])
    after = len(ours.ids) - half
    edit_s, edited = first_token(ours), ours.reuse
    ours.truncate(edited.reused + edited.read)
    theirs, _ = read_afresh(model, ours.ids, context)
    error = settled_difference(ours, theirs)
    texts = [each.generate(max_new_tokens=64).token_ids.tolist() for each in (ours, theirs)]

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a.session"
        start = time.perf_counter()
        ours.save(path)
        save_s, start = time.perf_counter() - start, time.perf_counter()
        restored = oj.Session.restore(model, path)
        restore_s, size = time.perf_counter() - start, path.stat().st_size
        settings = {"max_new_tokens": 64, "sampling": SAMPLED, "continued": True}
        a, b = (each.generate(**settings) for each in (ours, restored))
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        kills = killed_saves([theirs, restored], path, args.kills)

    def lower(name: str, value: float, unit: str, **bounds: float) -> Figure:
        return Figure(name=name, value=value, unit=unit, better="lower", **bounds)

    figures = [
        lower("session_turn_tokens_read", turn.read, "tokens", must=40.0),
        lower("session_turn_first_token", 1e3 * turn_s, "ms"),
        lower("session_reread_first_token", 1e3 * again_s, "ms"),
        lower("session_edit_tokens_read", edited.read, "tokens", must=2048.0 + after),
        lower("session_edit_first_token", 1e3 * edit_s, "ms"),
        lower("session_edit_error", error, "relative RMS", must=1e-5),
        lower("session_turn_error", turn_error, "relative RMS", must=1e-5),
        lower("session_save", 1e3 * save_s, "ms"),
        lower("session_restore", 1e3 * restore_s, "ms"),
        lower("session_size", size / 1e6, "MB"),
        lower("session_broken_by_kills", args.kills - len(kills.left), "files", must=0.0),
    ]
    for entry in figures:
        print(f"{entry.name:28} {entry.value:10.3g} {entry.unit}")
    details = {
        "tokens": args.tokens,
        "edit_text_equal": texts[0] == texts[1],
        "kills": args.kills,
        "kills_that_cut_a_file": kills.cut,
        "kills_that_left_the_second_session": sum(kills.left),
        "saves_finished": kills.saves,
    }
    print(details)
    print(record("bench/sessions.py", figures, details=details))


if __name__ == "__main__":
    main()
