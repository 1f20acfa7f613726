"""How a server is set up, checked before anything starts."""

import dataclasses
from pathlib import Path

from openjet_jax.checkpoint_store import CheckpointBudget
from openjet_jax.depth import parse_depth

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses, keys and limits.

    Attributes:
      host: address to listen on; others than the machine's own need a key.
      port: 0 picks a free one.
      name: what clients call the model; None takes it from the model's file.
      api_keys: any of them opens the server; conversations of two keys share nothing.
      agents: conversations on the device at once, idle ones included.
      queue_len: requests that may wait for a place.
      max_tokens: most tokens of an answer; None leaves it to the context.
      max_body_bytes: largest request.
      context: most positions of a conversation, prompt and answer.
      kv_dtype: format of the key-value cache.
      depth: drafts a cycle, as in `stream`.
      request_timeout_s: longest that a request may take, its wait for a place included; None sets
        no limit.
      checkpoints: bytes that checkpoints of one conversation may take.
      prefix_bytes: host memory for prefixes that conversations share.
      session_dir: where conversations are kept when the server ends; None keeps none.
      shutdown_s: how long running answers may take to end when the server is told to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    agents: int = 4
    queue_len: int = 32
    max_tokens: int | None = None
    max_body_bytes: int = 16 << 20
    context: int | None = None
    kv_dtype: str | None = None
    depth: str | None = None
    request_timeout_s: float | None = None
    checkpoints: CheckpointBudget = dataclasses.field(default_factory=CheckpointBudget)
    prefix_bytes: int = 4 << 30
    session_dir: Path | None = None
    shutdown_s: int = 30

    def __post_init__(self):
        """Raises ValueError naming the option, its limit and the way out."""
        limits = {
            "port": (self.port, 0, 65535),
            "agents": (self.agents, 1, 8),
            "queue_len": (self.queue_len, 0, 10_000),
            "max_tokens": (1 if self.max_tokens is None else self.max_tokens, 1, 1 << 24),
            "request_timeout_s": (
                1 if self.request_timeout_s is None else self.request_timeout_s,
                0.001,
                1e6,
            ),
            "max_body_bytes": (self.max_body_bytes, 1 << 10, 1 << 30),
            "prefix_bytes": (self.prefix_bytes, 0, 1 << 40),
            "shutdown_s": (self.shutdown_s, 0, 3600),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be in {low}..{high}")
        if self.depth is not None:
            parse_depth(self.depth)
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    "an API key must have 8 printable ASCII characters or more, and no space"
                )
        if self.host not in LOOPBACK and not self.api_keys:
            raise ValueError(
                f"host={self.host} lets other machines in: give an API key, or listen on 127.0.0.1"
            )
