"""A server says what memory it will need, and does not start where that is not there."""

import dataclasses

import pytest

from openjet_jax.checkpoint_store import CheckpointBudget
from openjet_jax.device_memory import Room
from openjet_jax.loading import contents
from openjet_jax.server import capacity
from openjet_jax.server.capacity import SHARE, serving_plan
from openjet_jax.server.config import ServerConfig
from openjet_jax.session import Session
from openjet_jax.session_memory import nbytes_of
from tests.server.conftest import CONTEXT

CONFIG = ServerConfig(agents=4, context=CONTEXT)


def plan_with(free: int | None, config: ServerConfig = CONFIG):
    """Returns the plan of a machine with that many bytes free."""
    plan = serving_plan(contents("tiny"), config)
    return dataclasses.replace(plan, device=free, host=free)


def test_a_conversation_takes_what_the_plan_says(ready_model):
    state = Session(ready_model, context=CONTEXT)._memory.conversation.state
    assert plan_with(None).model.state == nbytes_of(state)


def test_agents_that_do_not_fit_are_refused_with_how_many_would():
    plan = plan_with(None)
    for fit in (0, 1, 3):
        room = plan.needed - (4 - fit) * plan.model.state
        refused = plan_with(int((room + plan.model.state // 2) / SHARE))
        with pytest.raises(ValueError) as refusal:
            refused.check()
        assert (f"--agents {fit} would fit" if fit else "not even --agents 1") in str(refusal.value)
    plan_with(int(plan.needed / SHARE) + 16).check()
    plan_with(None).check()


def test_checkpoints_and_prefixes_keep_within_what_is_left():
    plan = plan_with(None)
    left = 400 << 20
    free = int((plan.needed + left) / SHARE)
    config = plan_with(free).fitted(CONFIG)
    budget = config.checkpoints
    kept = 4 * (budget.device_bytes + budget.host_bytes) + config.prefix_bytes
    assert 0.95 * left < kept <= left
    roomy = plan_with(1 << 40).fitted(CONFIG)
    assert roomy.checkpoints == CheckpointBudget() and roomy.prefix_bytes == CONFIG.prefix_bytes
    assert plan_with(None).fitted(CONFIG) == CONFIG


def test_the_command_prints_the_plan_and_refuses_before_it_loads(monkeypatch, capsys):
    from openjet_jax import cli, loading
    from openjet_jax.server import serve

    started = []
    monkeypatch.setattr(loading, "load", lambda *args, **options: started.append("loaded"))
    monkeypatch.setattr(serve, "serve", lambda model, config: started.append(config))
    assert cli.main(["serve", "tiny", "--agents", "2", "--context", "1024"]) == 0
    assert "conversations   2 x" in capsys.readouterr().out
    assert started[0] == "loaded" and started[1].agents == 2
    little = Room(device="a card", host=False, total=1 << 30, free=1 << 20)
    monkeypatch.setattr(capacity, "device_room", lambda: little)
    assert cli.main(["serve", "tiny", "--agents", "2", "--context", "1024"]) == 2
    assert "--agents 2 needs" in capsys.readouterr().err and len(started) == 2
