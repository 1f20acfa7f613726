"""Whether a server's conversations fit the memory, told before anything large is allocated."""

import dataclasses

import jax

from openjet_jax.checkpoint import CheckpointConfig
from openjet_jax.checkpoint_store import CheckpointBudget
from openjet_jax.device_memory import device_room, host_memory
from openjet_jax.engine import decode_config
from openjet_jax.memory import MemoryPlan, memory_plan, size_text
from openjet_jax.server.config import ServerConfig
from openjet_jax.tiling import resolve_backend

SHARE = 0.9
"""Of the memory that is free, how much is planned with; the rest is for what no plan knows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """Bytes a server needs, and bytes there are.

    Attributes:
      model: what one conversation of the model takes.
      agents: conversations on the device at once.
      device: bytes free on the device, None if it does not tell.
      host: bytes free in host memory, None if unknown; on a CPU the same as the device's.
    """

    model: MemoryPlan
    agents: int
    device: int | None
    host: int | None

    @property
    def needed(self) -> int:
        """Weights, conversations and workspace; checkpoints and prefixes take what is left."""
        return self.model.total + (self.agents - 1) * self.model.state

    @property
    def left(self) -> int | None:
        """Bytes on the device beyond what is needed, None if unknown."""
        return None if self.device is None else int(SHARE * self.device) - self.needed

    def check(self) -> None:
        """Raises ValueError, with what would fit, if the device has not the room."""
        if self.left is None or self.left >= 0:
            return
        fit = self.agents + self.left // self.model.state
        few = f"--agents {fit} would fit" if fit > 0 else "not even --agents 1 fits"
        raise ValueError(
            f"--agents {self.agents} needs {size_text(self.needed)}: "
            f"{size_text(self.needed - self.agents * self.model.state)} for the model and "
            f"{size_text(self.model.state)} for each conversation of {self.model.context:,} "
            f"positions; {size_text(self.needed + self.left)} can be used. {few}; ask for fewer, "
            "for a smaller --context, or for --kv-dtype bfloat16"
        )

    def fitted(self, config: ServerConfig) -> ServerConfig:
        """Returns a configuration whose checkpoints and prefixes keep within what is left.

        On a CPU all of it is one memory: half of what is left is for prefixes, a quarter each for
        what checkpoints take as the device's and as the host's.
        """
        on_device, on_host = self.left, self.host
        if on_device is None or on_host is None:
            return config
        if jax.default_backend() == "cpu":
            on_device, on_host = on_device // 4, 3 * on_device // 4
        else:
            on_host = int(SHARE * on_host)
        prefixes = min(config.prefix_bytes, 2 * on_host // 3)
        budget = CheckpointBudget(
            device_bytes=min(config.checkpoints.device_bytes, on_device // self.agents),
            host_bytes=min(config.checkpoints.host_bytes, (on_host - prefixes) // self.agents),
        )
        return dataclasses.replace(config, checkpoints=budget, prefix_bytes=prefixes)

    def text(self, config: ServerConfig) -> str:
        """Returns the plan in a few lines; `config` is from `fitted`."""
        model, agents, budget = self.model, self.agents, config.checkpoints
        rows = [
            ("weights", size_text(model.held)),
            ("conversations", f"{agents} x {size_text(model.state)}"),
            ("workspace", f"{size_text(model.workspace)}, estimated"),
            ("checkpoints", f"{agents} x {size_text(budget.device_bytes)} at most"),
            ("in host memory", f"{agents} x {size_text(budget.host_bytes)} at most"),
            ("prefixes there", f"{size_text(config.prefix_bytes)} at most"),
        ]
        free = "unknown" if self.device is None else size_text(self.device)
        head = f"memory for {model.context:,} positions, {model.kv_dtype} keys and values:"
        total = f"needed: {size_text(self.needed)}; free: {free}"
        return "\n".join([head, *(f"  {name:15} {value}" for name, value in rows), total])


def serving_plan(model: CheckpointConfig, config: ServerConfig) -> ServingPlan:
    """Returns what a server of a model needs; nothing is loaded.

    Args:
      model: a model's contents, from `contents`.
      config: the server's.

    Raises:
      ValueError: a context beyond the model's, or an unknown format.
    """
    decode = decode_config(model.model, config.context, config.kv_dtype)
    room, host = device_room(), jax.default_backend() == "cpu"
    plan = memory_plan(
        model.model, model.tensors, decode, backend=resolve_backend("auto"), host=host
    )
    return ServingPlan(
        model=plan,
        agents=config.agents,
        device=None if room is None else room.free,
        host=host_memory().get("available"),
    )
