"""Counters for Prometheus: requests, tokens, drafts, times, places."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from openjet_jax.answers import Piece

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(
        self, counts: Callable[[], Mapping[str, int]], programs: Callable[[], Mapping[str, int]]
    ):
        """Starts at zero.

        Args:
          counts: returns how many tasks wait, answers run and conversations are idle.
          programs: returns how many programs were compiled, and found compiled.
        """
        self._counts, self._programs = counts, programs
        own = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"openjet_{name}", text, labels, registry=own)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"openjet_{name}", text, buckets=_SECONDS, registry=own)

        self._requests = counter("requests", "Requests by path and status", "path", "status")
        self._tokens = counter("tokens", "Tokens: cached, read, generated", "kind")
        self._drafts = counter("drafts", "Drafts by position and outcome", "position", "outcome")
        self._dispatch = histogram("dispatch_seconds", "One turn of the device")
        self._first = histogram("first_token_seconds", "From a request's arrival to its first text")
        self._places = Gauge("openjet_conversations", "By state", ["state"], registry=own)
        self._made = Gauge("openjet_programs", "Made ready, by way", ["way"], registry=own)

    def request(self, path: str, status: int) -> None:
        """Counts a response."""
        self._requests.labels(path, str(status)).inc()

    def dispatch(self, seconds: float) -> None:
        """Counts one turn of the device."""
        self._dispatch.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Counts the wait for an answer's first piece."""
        self._first.observe(seconds)

    def prompt(self, read: int, cached: int) -> None:
        """Counts a prompt's tokens."""
        self._tokens.labels("read").inc(read)
        self._tokens.labels("cached").inc(cached)

    def piece(self, piece: Piece) -> None:
        """Counts what a piece brought: tokens, and what became of drafts."""
        self._tokens.labels("generated").inc(len(piece.token_ids))
        for drafted, accepted in piece.cycles:
            for position in range(drafted):
                outcome = "accepted" if position < accepted else "rejected"
                self._drafts.labels(str(position + 1), outcome).inc()

    def text(self) -> bytes:
        """Returns everything in Prometheus's text format."""
        for state, count in self._counts().items():
            self._places.labels(state).set(count)
        for way, count in self._programs().items():
            self._made.labels(way).set(count)
        return generate_latest(self.registry)
