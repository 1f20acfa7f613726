"""Conversations that last: turns, edits and files against reading everything again; killed saves.

    python -m bench.sessions [MODEL] [--tokens 4200] [--kills 100]

Gates: after an edit the states agree with a fresh reading to 1e-5, a restored session goes on with
the same bits, and what a killed save left is the old session or the new one, whole. The processes
that are killed are forked from this one and write two sessions by turns, from host memory, through
the code that `Session.save` runs.
"""

import argparse
import os
import pathlib
import signal
import tempfile
import time
import types
from typing import Any

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


def read_afresh(model: oj.Model, ids: tuple[int, ...], context: int) -> tuple[oj.Session, float]:
    """Returns a session that read these ids from the beginning, and its seconds to a token."""
    session = oj.Session(model, context=context)
    session.append(ids)
    seconds = first_token(session)
    session.truncate(len(ids))
    return session, seconds


def killed_saves(both: list[oj.Session], path: pathlib.Path, times: int) -> list[int]:
    """Kills a process in the middle of saving, again and again; returns which session was left.

    Args:
      both: two sessions, told apart by their ids.
      path: the file that all of them write.
      times: processes to kill.
    """
    model, random = both[0].model, np.random.default_rng(0)
    host = [_in_host_memory(session) for session in both]
    start = time.perf_counter()
    save_session(path, model, host[0], list(both[0].ids), 0)
    save_s, left = time.perf_counter() - start, []
    for _ in range(times):
        child = os.fork()
        if child == 0:
            while True:
                for memory, session in reversed(list(zip(host, both, strict=True))):
                    save_session(path, model, memory, list(session.ids), 0)
        time.sleep(random.uniform(0, 4 * save_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        restored = oj.Session.restore(model, path)
        left.append([session.ids for session in both].index(restored.ids))
        restored.append([1])
        assert restored.read().reused == len(both[left[-1]].ids)
        restored.close()
    return left


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
    read_afresh(model, tuple(ids[:700]), context)[0].fork().close()  # programs become ready

    ours, _ = read_afresh(model, tuple(ids), context)
    ours.append(ids[:40])
    turn_s = first_token(ours)
    turn = ours.reuse
    _, again_s = read_afresh(model, ours.ids[:-8], context)

    half = len(ours.ids) // 2
    ours.replace([*ours.ids[:half], *ids[:20], *ours.ids[half:]])
    after = len(ours.ids) - half
    edit_s, edited = first_token(ours), ours.reuse
    ours.truncate(edited.reused + edited.read)
    theirs, _ = read_afresh(model, ours.ids, context)
    for each in (ours, theirs):
        each.append([1])
        each.read()
    error = difference(ours, theirs)
    assert error < 1e-5, error
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
        left = killed_saves([theirs, restored], path, args.kills)

    def lower(name: str, value: float, unit: str, **bounds: float) -> Figure:
        return Figure(name=name, value=value, unit=unit, better="lower", **bounds)

    figures = [
        lower("session_turn_tokens_read", turn.read, "tokens", must=40.0),
        lower("session_turn_first_token", 1e3 * turn_s, "ms"),
        lower("session_reread_first_token", 1e3 * again_s, "ms"),
        lower("session_edit_tokens_read", edited.read, "tokens", must=2048.0 + after),
        lower("session_edit_first_token", 1e3 * edit_s, "ms"),
        lower("session_edit_error", error, "relative RMS", must=1e-5),
        lower("session_save", 1e3 * save_s, "ms"),
        lower("session_restore", 1e3 * restore_s, "ms"),
        lower("session_size", size / 1e6, "MB"),
        lower("session_broken_by_kills", args.kills - len(left), "files", must=0.0),
    ]
    for entry in figures:
        print(f"{entry.name:28} {entry.value:10.3g} {entry.unit}")
    print(f"after {after} tokens edited the text is the same: {texts[0] == texts[1]}")
    print(f"{len(left)} kills left the first session {left.count(0)} times, the second the others")
    print(record("bench/sessions.py", figures))


if __name__ == "__main__":
    main()
