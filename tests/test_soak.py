"""A soak passes where nothing changes, and each thing that it watches can fail it."""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import openjet_jax as oj
from bench import soak, soak_requests
from bench.soak import PROBES, Soak, figures
from bench.soak_requests import KINDS, Asked, Requests, Wrong, answered, depths_of, programs_of
from openjet_jax.compiled import CompileEvent

pytestmark = pytest.mark.xdist_group("soak")

ALL = {name: getattr(soak_requests, name) for name in ("KINDS", "DEPTHS", "LONG")}
FEW = ("greedy", "best tokens, penalties, bias")
FOREVER, STEADY = math.inf, {"device": 1000, "process": 1000}


@pytest.fixture(scope="module")
def warm() -> Iterator[Soak]:
    """A soak of two kinds of request, warmed up; few programs are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "KINDS", kinds := {kind: KINDS[kind] for kind in FEW})
        patch.setattr(soak_requests, "KINDS", kinds)
        patch.setattr(soak_requests, "DEPTHS", {})
        patch.setattr(soak, "PROBES", [(kind, depth, 40) for kind, depth, _ in PROBES[1:3]])
        patch.setattr(soak, "PROBE_TOKENS", 8)
        for module in (soak, soak_requests):
            patch.setattr(module, "LONG", 400)
        model = oj.load("tiny")
        text = model.tokenizer.encode("def f(x):\n    return x + 1\n" * 20)
        made = Soak(model, Requests(model, 448, seed=1, text=text), "q8_0")
        made.warm_up()
        patch.setattr(soak, "memory", lambda: dict(STEADY))
        yield made


@pytest.fixture
def fresh(warm: Soak) -> Iterator[Soak]:
    """The same, with nothing left of other tests."""
    first = [list(tokens) for tokens in warm.answers[0]]
    yield warm
    warm.close()
    warm.answers[:] = [first]


def test_nothing_changes_over_requests_of_every_kind(fresh: Soak):
    found = fresh.run(12, FOREVER)
    assert json.loads(json.dumps(found)) == found
    assert (found["requests"], found["compiled_after_warm_up"]) == (12, 0)
    assert found["rounds_of_equal_probes"] == 2
    assert sum(n for label, n in found["counts"].items() if label.startswith("ended")) == 12
    requests, growth = figures(found, "tiny")
    assert (requests.name, requests.value, requests.must) == ("tiny_soak_requests", 12, 1000)
    assert (growth.name, growth.value, growth.must) == ("tiny_soak_memory_growth", 0.0, 2.0)


def test_a_changed_token_fails(fresh: Soak):
    fresh.answers[0][1][-1] += 1
    with pytest.raises(Wrong, match=r"probes \[1\] give other tokens after 3 requests"):
        fresh.run(3, FOREVER)


def test_a_program_that_is_made_ready_late_fails(fresh: Soak):
    fresh.programs.events.append(CompileEvent("cycles_late", 1.0, True))
    with pytest.raises(Wrong, match=r"after the warm-up: \['cycles_late'\]; 0 compilations"):
        fresh.run(1, FOREVER)
    fresh.programs.events.pop()


def test_anything_that_jax_compiles_fails(fresh: Soak, monkeypatch: pytest.MonkeyPatch):
    def draw() -> Asked:
        jax.jit(lambda x: x + 1)(np.ones(3, np.float32))
        return drawn()

    drawn = fresh.requests.draw
    monkeypatch.setattr(fresh.requests, "draw", draw)
    with pytest.raises(Wrong, match="1 compilations after 1 requests"):
        fresh.run(1, FOREVER)


def test_a_nan_in_a_state_fails(fresh: Soak):
    turn = Asked(kind="greedy", ids=(1, 2), settings={"depth": 5, "max_new_tokens": 2})
    fresh.one(dataclasses.replace(turn, change="new"))
    session = fresh._sessions[0]
    assert session is not None
    conversation = session._memory.conversation
    bad = jnp.full_like(conversation.state.hidden, jnp.nan)
    conversation.state = eqx.tree_at(lambda state: state.hidden, conversation.state, bad)
    with pytest.raises(Wrong, match=f"holds {bad.size} NaN"):
        fresh.probe()


def test_memory_that_grows_fails(fresh: Soak, monkeypatch: pytest.MonkeyPatch):
    sizes = iter([STEADY, {"device": 1021, "process": 1000}])
    monkeypatch.setattr(soak, "memory", lambda: next(sizes))
    with pytest.raises(Wrong, match=r"memory grew by 2\.10 %"):
        figures(fresh.run(4, FOREVER), "")


def test_a_run_that_is_cut_short_says_so(fresh: Soak, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Wrong, match="0 of 4 requests in time, less than a quarter"):
        fresh.run(4, deadline=0.0)
    times = iter([0.0, 1.0, 2.0, 3.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(soak.time, "monotonic", lambda: next(times, 9.0))
    with monkeypatch.context() as patch:
        patch.setattr(
            fresh, "one", lambda asked: setattr(fresh, "num_requests", fresh.num_requests + 1)
        )
        assert fresh.run(4, deadline=5.0)["requests"] == 3


def test_what_raises_is_not_swallowed(fresh: Soak):
    full = Asked(kind="greedy", ids=(1,) * 500, settings={"max_new_tokens": 1, "depth": 5})
    with pytest.raises(ValueError, match="do not fit"):
        fresh.one(full)


def piece(**changes: Any) -> oj.Piece:
    known: dict[str, Any] = {"text": "ab", "token_ids": [1, 2], "logprobs": [-1.0, -2.0]}
    known |= {"top_logprobs": [], "cycles": [(1, 1)], "finish_reason": "length"}
    return oj.Piece(**{**known, "stats": oj.Stats(), **changes})


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"logprobs": [-1.0, math.nan]}, "log-probabilities are finite"),
        ({"logprobs": [-1.0]}, "log-probabilities are finite"),
        ({"top_logprobs": [[(1, math.nan)]]}, "log-probabilities are finite"),
        ({"token_ids": [1, 10]}, "ids are of the vocabulary"),
        ({"token_ids": [1], "logprobs": [-1.0]}, "as many tokens as asked for"),
        ({"finish_reason": "timeout"}, "it ends where it should"),
        ({"finish_reason": None}, "it ends where it should"),
        ({"text": "a.b"}, "text ends before a stop string"),
    ],
)
def test_an_answer_that_is_not_as_asked_for_fails(changes: dict[str, Any], wrong: str):
    settings = {"max_new_tokens": 2, "depth": 0, "stop": (".",), "ignore_eos": True}
    asked = Asked(kind="greedy", ids=(1,), settings=settings)
    assert answered(iter([piece()]), asked, vocab=10).token_ids == [1, 2]
    with pytest.raises(Wrong, match=wrong):
        answered(iter([piece(**changes)]), asked, vocab=10)


def test_a_caller_leaves_after_as_many_pieces_as_drawn():
    def pieces() -> Iterator[oj.Piece]:
        try:
            while True:
                yield piece(finish_reason=None)
        finally:
            closed.append(True)

    closed: list[bool] = []
    settings = {"max_new_tokens": 48, "depth": 0}
    asked = Asked(kind="greedy", ids=(1,), settings=settings, leave_after=3)
    found = answered(pieces(), asked, vocab=10)
    assert (len(found.token_ids), found.reason, closed) == (6, None, [True])


def test_requests_are_of_every_kind_and_the_same_for_a_seed(monkeypatch: pytest.MonkeyPatch):
    for name, value in ALL.items():
        monkeypatch.setattr(soak_requests, name, value)
    model = oj.load("tiny")
    first, second = (Requests(model, 3048, seed=3, text=range(100)) for _ in range(2))
    first.stops = second.stops = ["e", " "]
    asked = [first.draw() for _ in range(1000)]
    assert asked == [second.draw() for _ in range(1000)]
    labels = {label for each in asked for label in each.labels()}
    depths = {f"depth {depth}" for kind in KINDS for depth in depths_of(model, kind)}
    assert labels >= {
        *KINDS,
        *depths,
        "alone",
        "turn: edit",
        "turn: rollback",
        "with a stop string",
    }
    assert 70 <= sum(each.leave_after is not None for each in asked) <= 130
    lengths = [len(each.ids) for each in asked]
    assert min(lengths) == 1 and 2000 < max(lengths) <= 3000
    assert {each.settings["max_new_tokens"] for each in asked} >= {1, 47, 48}
    assert len(programs_of(model)) == len(KINDS) + 2


def test_only_a_soak_in_which_everything_held_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    def soaked(model: oj.Model, args: argparse.Namespace) -> dict[str, Any]:
        if args.seed:
            raise Wrong("a probe gave other tokens")
        return {"requests": 300, "growth": {"device": 0.5}}

    monkeypatch.setattr(soak, "soaked", soaked)
    command = ["soak", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--seed", "1"])
    assert soak.main() == 1 and not list(tmp_path.iterdir())
    assert "other tokens: nothing is recorded" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", command)
    assert soak.main() == 0
    assert "300 of 1000 requests were made" in capsys.readouterr().out
    (requests, growth) = json.loads((tmp_path / "cpu" / "summary.json").read_text())
    assert (requests["value"], requests["must"], growth["value"]) == (300, 1000, 0.5)
