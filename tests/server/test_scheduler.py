"""Who gets the device: fair slices, a bounded queue, cancellation, and places that come back."""

import threading
import time
from types import SimpleNamespace

import pytest

from openjet_jax.answers import Piece
from openjet_jax.server.scheduler import Scheduler
from openjet_jax.server.tasks import Busy, Late, Started, Stopping, Task
from openjet_jax.session_memory import Reuse
from openjet_jax.settings import Sampling
from openjet_jax.stats import Stats

PROMPT_DISPATCHES = 2


class FakeSession:
    """A conversation without a model: every token takes the time its sampling's seed says."""

    made = 0

    def __init__(self, scope):
        FakeSession.made += 1
        self.scope, self.ids, self.read, self.closed = scope, (), (), False
        self.reuse = Reuse()
        self.model = SimpleNamespace(tokenizer=None)

    def reusable(self, ids):
        kept = 0
        while kept < min(len(ids), len(self.read)) and ids[kept] == self.read[kept]:
            kept += 1
        return kept

    def replace(self, ids):
        self.reuse = Reuse(reused=self.reusable(ids))
        self.ids = tuple(ids)

    def reading(self):
        yield from reversed(range(PROMPT_DISPATCHES))
        self.read = self.ids

    def stream(self, *, max_new_tokens, sampling, **_):
        if sampling.seed == 999:
            raise ValueError("refused")
        for i in range(max_new_tokens):
            time.sleep(sampling.seed / 1000)
            self.ids = self.read = (*self.ids, 7)
            reason = "length" if i == max_new_tokens - 1 else None
            yield Piece(
                text="x",
                token_ids=[7],
                logprobs=[0.0],
                top_logprobs=[],
                cycles=[],
                finish_reason=reason,
                stats=Stats(),
            )

    def fork(self):
        twin = FakeSession(self.scope)
        twin.ids, twin.read, twin.reuse = self.ids, self.read, self.reuse
        return twin

    def publish(self):
        pass

    def close(self):
        self.closed = True


class Client:
    """Collects what a task delivers."""

    def __init__(self, ids=(1, 2, 3), *, n=1, tokens=5, ms=0, scope="", seconds=None):
        self.deliveries, self.times, self.ended = [], [], threading.Event()
        self.n = n
        self.task = Task(
            ids=list(ids),
            keep_tokens=False,
            scope=scope,
            samplings=tuple(Sampling(temperature=1, seed=ms) for _ in range(n)),
            max_new_tokens=tokens,
            deadline=None if seconds is None else time.monotonic() + seconds,
            deliver=self.deliver,
        )

    def deliver(self, number, delivery):
        self.deliveries.append((number, delivery))
        self.times.append(time.perf_counter())
        finished = [d for _, d in self.deliveries if isinstance(d, Piece) and d.finish_reason]
        if isinstance(delivery, Exception) or len(finished) == self.n:
            self.ended.set()

    @property
    def cached(self):
        return next(d.cached_tokens for _, d in self.deliveries if isinstance(d, Started))

    @property
    def tokens(self):
        return sum(isinstance(d, Piece) for _, d in self.deliveries)


@pytest.fixture
def scheduler():
    FakeSession.made = 0
    made = Scheduler(FakeSession, agents=2, queue_len=2)  # pyright: ignore[reportArgumentType]
    yield made
    made.stop()


def run(scheduler, *clients):
    for client in clients:
        scheduler.submit(client.task)
    for client in clients:
        assert client.ended.wait(10)


def test_every_token_arrives_in_order_after_the_prompt(scheduler):
    client = Client(tokens=4)
    run(scheduler, client)
    assert isinstance(client.deliveries[0][1], Started) and client.tokens == 4


def test_a_returning_conversation_is_found_by_its_tokens(scheduler):
    run(scheduler, Client([1, 2, 3], tokens=2))
    run(scheduler, Client([9, 9, 9, 9], tokens=2))
    again = Client([1, 2, 3, 7, 7, 5])
    run(scheduler, again)
    assert again.cached == 5 and FakeSession.made == 2


def test_another_scope_shares_nothing(scheduler):
    run(scheduler, Client([1, 2, 3], scope="a"))
    other = Client([1, 2, 3], scope="b")
    run(scheduler, other)
    assert other.cached == 0


def test_a_conversation_that_merely_begins_alike_is_kept(scheduler):
    long = list(range(100))
    run(scheduler, Client(long, tokens=1))
    run(scheduler, Client([0, 1, 2, 500], tokens=1))
    again = Client([*long, 7, 8], tokens=1)
    run(scheduler, again)
    assert again.cached == 101


def test_two_answers_get_equal_time_whatever_a_turn_costs(scheduler):
    fast, slow = Client([1], tokens=400, ms=1), Client([2], tokens=400, ms=4)
    scheduler.submit(slow.task)
    scheduler.submit(fast.task)
    assert fast.ended.wait(30)
    slow.task.cancel()
    # The fast one ended after 400 turns of about 1 ms; the slow one had as much time meanwhile.
    assert 60 < slow.tokens < 140


def test_copies_of_a_prompt_read_it_once(scheduler):
    client = Client(n=2, tokens=3)
    run(scheduler, client)
    assert client.tokens == 6 and {number for number, _ in client.deliveries} == {0, 1}


def test_more_copies_than_places_are_refused(scheduler):
    with pytest.raises(ValueError):
        scheduler.submit(Client(n=3).task)


def test_a_full_queue_says_when_to_try_again(scheduler):
    clients = [Client([i], tokens=200, ms=2) for i in range(4)]
    for client in clients[:2]:
        scheduler.submit(client.task)
    deadline = time.monotonic() + 5
    while scheduler.counts()["running"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for client in clients[2:]:
        scheduler.submit(client.task)
    with pytest.raises(Busy) as refusal:
        scheduler.submit(Client([9]).task)
    assert 1 <= refusal.value.retry_after_s <= 60
    for client in clients:
        client.task.cancel()


def test_a_cancelled_task_ends_within_one_turn_and_frees_its_place(scheduler):
    client = Client(tokens=10_000, ms=5)
    scheduler.submit(client.task)
    while client.tokens < 3:
        time.sleep(0.002)
    seen = client.tokens
    client.task.cancel()
    deadline = time.monotonic() + 5
    while scheduler.counts()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert client.tokens <= seen + 1
    run(scheduler, Client(n=2))


def test_a_cancelled_task_ends_after_the_turn_that_runs_whoever_is_next():
    made = Scheduler(FakeSession, agents=8, queue_len=2)  # pyright: ignore[reportArgumentType]
    clients = [Client([i], tokens=10_000, ms=10) for i in range(8)]
    for client in clients:
        made.submit(client.task)
    while min(client.tokens for client in clients) < 2:
        time.sleep(0.002)
    for gone, client in enumerate(clients[:4], 1):
        turns = sum(client.tokens for client in clients)
        client.task.cancel()
        while made.counts()["running"] > 8 - gone:
            time.sleep(0.001)
        assert sum(client.tokens for client in clients) <= turns + 2
    made.stop()


def test_a_task_whose_time_is_over_before_its_answer_begins_is_told_so(scheduler):
    busy = [Client([i], tokens=10_000, ms=5) for i in range(2)]
    for client in busy:
        scheduler.submit(client.task)
    waiting = Client([7], seconds=0.1)
    scheduler.submit(waiting.task)
    assert waiting.ended.wait(5) and isinstance(waiting.deliveries[0][1], Late)
    for client in busy:
        client.task.cancel()
    reading = Client([8], seconds=0)
    run(scheduler, reading)
    assert isinstance(reading.deliveries[0][1], Late)
    run(scheduler, Client(n=2))


def test_a_cancelled_task_in_the_queue_never_starts(scheduler):
    busy = [Client([i], tokens=100, ms=2) for i in range(2)]
    for client in busy:
        scheduler.submit(client.task)
    waiting = Client([5])
    scheduler.submit(waiting.task)
    waiting.task.cancel()
    for client in busy:
        client.ended.wait(10)
    run(scheduler, Client([6]))
    assert not waiting.deliveries


def test_a_failure_reaches_its_client_alone(scheduler):
    broken, sound = Client([1], ms=999), Client([2])
    run(scheduler, broken, sound)
    assert isinstance(broken.deliveries[-1][1], ValueError) and sound.tokens == 5
    run(scheduler, Client(n=2))


def test_stopping_tells_everyone():
    scheduler = Scheduler(FakeSession, agents=1, queue_len=2)  # pyright: ignore[reportArgumentType]
    clients = [Client([i], tokens=10_000, ms=1) for i in range(2)]
    for client in clients:
        scheduler.submit(client.task)
    scheduler.stop()
    for client in clients:
        assert client.ended.wait(5) and isinstance(client.deliveries[-1][1], Stopping)
    with pytest.raises(Stopping):
        scheduler.submit(Client().task)
