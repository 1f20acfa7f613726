"""What a generation cost and how well its drafts did."""

import dataclasses

from openjet_jax.config import MAX_DEPTH


@dataclasses.dataclass(kw_only=True)
class Stats:
    """Counts and times of one generation.

    Times are wall-clock seconds on the host. Decode counts every cycle, the first token's too.

    Attributes:
      prompt_tokens: tokens read, the last of them by the first cycle.
      reused_tokens: tokens of the prompt that a session did not read again.
      new_tokens: tokens emitted.
      ready_s: getting programs: loading them from the cache or compiling.
      prefill_s: reading the prompt.
      decode_s: all cycles.
      first_token_s: from the start of reading to the first burst, without `ready_s`.
      cycles, dispatches: how many there were.
      compiled: programs that had to be compiled.
      drafted, accepted: by draft position, how many drafts were verified, and how many survived:
        they and all drafts before them in their cycle were accepted.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    ready_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    cycles: int = 0
    dispatches: int = 0
    compiled: int = 0
    drafted: list[int] = dataclasses.field(default_factory=lambda: [0] * MAX_DEPTH)
    accepted: list[int] = dataclasses.field(default_factory=lambda: [0] * MAX_DEPTH)

    def count(self, cycles: list[tuple[int, int]]) -> None:
        """Takes in the (drafted, accepted) counts of cycles."""
        self.cycles += len(cycles)
        for drafted, accepted in cycles:
            for position in range(drafted):
                self.drafted[position] += 1
                self.accepted[position] += position < accepted

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Emitted tokens a second."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Emitted tokens a cycle."""
        return self.new_tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance(self) -> list[float]:
        """By draft position, the share of verified drafts that survived; 0 where none was made.

        Not conditional on the draft before: at a fixed depth it falls with the position, and a
        cycle emits one token more than the sum.
        """
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """Returns counts, times and rates as plain numbers, for JSON."""
        return dataclasses.asdict(self) | {
            "prefill_tokens_per_s": self.prefill_rate,
            "decode_tokens_per_s": self.decode_rate,
            "tokens_per_cycle": self.tokens_per_cycle,
            "cycle_ms": 1e3 * self.decode_s / self.cycles if self.cycles else 0.0,
            "acceptance": self.acceptance,
        }

    def __str__(self) -> str:
        """Returns one line for people."""
        tokens = "token" if self.prompt_tokens == 1 else "tokens"
        line = (
            f"{self.prompt_tokens} {tokens} read at {self.prefill_rate:.0f} tok/s, "
            f"{self.new_tokens} generated at {self.decode_rate:.1f} tok/s"
        )
        if any(self.drafted):
            tried = [f"{a:.2f}" for a, d in zip(self.acceptance, self.drafted, strict=True) if d]
            line += f", {self.tokens_per_cycle:.2f} tokens a cycle, accepted {' '.join(tried)}"
        return line
