"""Who gets the device next: one thread, fair slices of a dispatch, a bounded queue.

Conversations stay on the device after their answer. A request takes the one that shares most with
its prompt, found by token ids, so that clients that send the whole conversation every time have
only their new tokens read. Requests of different scopes never share anything.
"""

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from openjet_jax.server.tasks import Busy, Delivery, Late, Started, Stopping, Task
from openjet_jax.session import Session
from openjet_jax.token_splice import spliced


class _End:
    """A run has no more steps."""


@dataclasses.dataclass(eq=False)
class _Run:
    """One answer in the making.

    Attributes:
      room: conversations it will take: its own and the copies still to be made.
      used_s: the device time it had, counted from that of the least served when it came.
    """

    task: Task
    number: int
    session: Session
    steps: Iterator[Delivery | None]
    room: int
    used_s: float
    began: float = dataclasses.field(default_factory=time.perf_counter)


@dataclasses.dataclass(eq=False)
class _Idle:
    """A conversation that waits for its next turn."""

    session: Session
    scope: str
    since: int

    def prompt_of(self, task: Task) -> list[int]:
        """Returns a task's prompt, cut into tokens as this conversation had it if that may be."""
        if not task.keep_tokens:
            return list(task.ids)
        return spliced(self.session.ids, task.ids, self.session.model.tokenizer)


class Scheduler:
    """Runs tasks on conversations, at most `agents` of them resident.

    Attributes:
      agents: conversations on the device, idle ones included.
      queue_len: tasks that may wait.
    """

    def __init__(
        self,
        new_session: Callable[[str], Session],
        *,
        agents: int,
        queue_len: int,
        kept: Sequence[tuple[str, Session]] = (),
        observe: Callable[[float], None] = lambda seconds: None,
    ):
        """Starts the thread.

        Args:
          new_session: makes an empty conversation of a scope.
          agents: most conversations on the device.
          queue_len: most tasks that wait.
          kept: conversations to begin with, each with its scope, the oldest first.
          observe: told how long each turn of the device took.
        """
        self.agents, self.queue_len = agents, queue_len
        self._new_session, self._observe = new_session, observe
        self._waiting: collections.deque[Task] = collections.deque()
        self._running: list[_Run] = []
        self._turn = itertools.count()
        self._idle = [_Idle(session, scope, next(self._turn)) for scope, session in kept]
        self._changed = threading.Condition()
        self._stopping = False
        self._task_s = 1.0  # running mean of a task's time, for Retry-After
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queues a task.

        Raises:
          Busy: the queue is full.
          Stopping: the server shuts down.
          ValueError: it asks for more answers than conversations fit.
        """
        if len(task.samplings) > self.agents:
            raise ValueError(f"n={len(task.samplings)} must be at most {self.agents}")
        with self._changed:
            if self._stopping:
                raise Stopping
            waiting = [waits for waits in self._waiting if not waits.cancelled.is_set()]
            self._waiting = collections.deque(waiting)
            ahead = self._queued()
            free = self._free() - sum(len(t.samplings) for t in self._waiting)
            if ahead >= self.queue_len and (ahead or free < len(task.samplings)):
                rounds = (ahead + 1) / self.agents
                raise Busy(max(1, min(60, round(rounds * self._task_s))))
            self._waiting.append(task)
            self._changed.notify()

    def counts(self) -> dict[str, int]:
        """Returns how many tasks wait, answers run, and conversations are idle."""
        with self._changed:
            return {
                "waiting": self._queued(),
                "running": len(self._running),
                "idle": len(self._idle),
            }

    def stop(self) -> list[tuple[str, Session]]:
        """Ends running tasks with `Stopping`, then the thread.

        Returns:
          The conversations there are, each with its scope, the oldest first.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        return [(idle.scope, idle.session) for idle in self._idle]

    def _queued(self) -> int:
        """Returns how many tasks wait for a place, less those that are just about to start."""
        free = self._free()
        for started, task in enumerate(self._waiting):
            free -= len(task.samplings)
            if free < 0:
                return len(self._waiting) - started
        return 0

    def _free(self) -> int:
        return self.agents - sum(run.room for run in self._running)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._running or self._waiting or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    break
                late = self._take_late()
                task = self._next_task()
            for each in late:
                each.deliver(0, Late())
            for run in [run for run in self._running if run.task.cancelled.is_set()]:
                self._end(run)
            if task is not None:
                self._start(task)
            if self._running:
                self._step(min(self._running, key=lambda run: run.used_s))
        for run in list(self._running):
            self._end(run)
            run.task.deliver(run.number, Stopping())
        for task in self._waiting:
            task.deliver(0, Stopping())

    def _take_late(self) -> list[Task]:
        """Takes the tasks off the queue whose time is over."""
        late = [task for task in self._waiting if task.late]
        for task in late:
            self._waiting.remove(task)
        return late

    def _next_task(self) -> Task | None:
        """Takes the next task off the queue if there is room for it."""
        while self._waiting and self._waiting[0].cancelled.is_set():
            self._waiting.popleft()
        if self._waiting and self._free() >= len(self._waiting[0].samplings):
            return self._waiting.popleft()
        return None

    def _start(self, task: Task) -> None:
        """Gives a task a conversation."""
        try:
            session, ids = self._session_for(task)
            session.replace(ids)
        except Exception as error:
            task.deliver(0, error)
            return
        used = min((run.used_s for run in self._running), default=0.0)
        run = _Run(task, 0, session, iter(()), len(task.samplings), used)
        run.steps = self._first_steps(run)
        self._running.append(run)

    def _session_for(self, task: Task) -> tuple[Session, list[int]]:
        """Returns the idle conversation that shares most with a task, or a new one; its prompt."""
        room = self._free() - len(self._idle) - len(task.samplings)
        found: list[tuple[int, int, _Idle, list[int]]] = []
        for idle in self._idle:
            if idle.scope == task.scope:
                ids = idle.prompt_of(task)
                found.append((idle.session.reusable(ids), idle.since, idle, ids))
        shared, _, best, ids = max(found, default=(0, 0, None, list(task.ids)))
        # Another conversation that merely begins alike is kept, as long as there is room.
        if best is not None and shared and (room < 0 or 2 * shared >= len(best.session.ids)):
            self._idle.remove(best)
            room += 1
        else:
            best, ids = None, list(task.ids)
        while room < 0 and self._idle:
            self._evict(min(self._idle, key=lambda idle: idle.since))
            room += 1
        return (best.session if best is not None else self._new_session(task.scope)), ids

    def _evict(self, idle: _Idle) -> None:
        """Takes a conversation off the device; the prefix cache may keep it in host memory."""
        self._idle.remove(idle)
        idle.session.publish()
        idle.session.close()

    def _first_steps(self, run: _Run) -> Iterator[Delivery | None]:
        """Reads the prompt, makes a copy for each further answer, then generates the first."""
        task = run.task
        for _ in run.session.reading():
            if task.late:
                raise Late
            yield None
        started = Started(len(run.session.ids), run.session.reuse.reused)
        for number in range(1, len(task.samplings)):
            twin = run.session.fork()
            steps = self._answer(task, number, twin, started)
            self._running.append(_Run(task, number, twin, steps, 1, run.used_s))
            run.room -= 1
        yield from self._answer(task, 0, run.session, started)

    def _answer(
        self, task: Task, number: int, session: Session, started: Started
    ) -> Iterator[Delivery]:
        yield started
        yield from session.stream(
            max_new_tokens=task.max_new_tokens,
            sampling=task.samplings[number],
            depth=task.depth,
            stop=task.stop,
            constraint=task.constraint() if task.constraint is not None else None,
            top_logprobs=task.top_logprobs,
            deadline=task.deadline,
        )

    def _step(self, run: _Run) -> None:
        """Runs one dispatch of a run and delivers what came."""
        start = time.perf_counter()
        try:
            delivery = next(run.steps, _End())
        except Late as error:
            self._end(run)
            run.task.deliver(run.number, error)
            return
        except Exception as error:
            # What is left of the conversation is not known: it is dropped.
            self._running.remove(run)
            run.task.deliver(run.number, error)
            return
        seconds = time.perf_counter() - start
        run.used_s += seconds
        self._observe(seconds)
        if isinstance(delivery, _End):
            self._end(run)
        elif delivery is not None and not run.task.cancelled.is_set():
            run.task.deliver(run.number, delivery)

    def _end(self, run: _Run) -> None:
        """Keeps a run's conversation for its next turn."""
        close = getattr(run.steps, "close", None)
        if close is not None:
            close()
        self._running.remove(run)
        self._idle.append(_Idle(run.session, run.task.scope, next(self._turn)))
        self._task_s += 0.2 * (time.perf_counter() - run.began - self._task_s)
