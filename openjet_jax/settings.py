"""What a user may ask of sampling, checked before anything runs. Knows no arrays.

The order of operations is fixed: repetition, presence and frequency penalties, logit bias,
temperature, top-k, top-p, min-p. `sampling` carries it out on the device.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

CANDIDATES = 64
"""Largest top-k that is found without a search over the whole vocabulary."""

MAX_TOP_LOGPROBS = 20
"""Most alternatives that are reported beside a token."""

Method = Literal["greedy", "plain", "top_k", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingKind:
    """Which program a request needs; every number a user sets is an operand of that program.

    Attributes:
      method: "greedy" takes the best token; "plain" samples with a temperature and no filter;
        "top_k" filters the best `CANDIDATES` tokens; "full" filters the whole vocabulary.
      adjusted: whether penalties and bias are computed. A program that computes them is right for
        every request, one that does not only for requests without any.
      masked: whether rows choose among the tokens that a constraint allows them.
      ranked: whether the likeliest tokens of every row are reported too.
    """

    method: Method = "greedy"
    adjusted: bool = False
    masked: bool = False
    ranked: bool = False

    @property
    def draft(self) -> "SamplingKind":
        """The kind a drafter uses: "full" drafts from its best `CANDIDATES` tokens instead.

        Drafts may come from any distribution; the threshold search costs more than the few
        drafts it would win.
        """
        return dataclasses.replace(self, method="top_k") if self.method == "full" else self


_RANGES = {
    "top_p": (0.0, 1.0, "top_p=1 keeps every token, temperature=0 only the best"),
    "min_p": (0.0, 1.0, "min_p=0 keeps every token"),
    "repetition_penalty": (0.01, 100.0, "1 turns it off, more than 1 discourages repetition"),
    "presence_penalty": (-100.0, 100.0, "0 turns it off, OpenAI allows -2 to 2"),
    "frequency_penalty": (-100.0, 100.0, "0 turns it off, OpenAI allows -2 to 2"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy decoding.

    Text is a function of the prompt and these settings alone: the depth of speculation never
    changes it. Every probability below is renormalised over what the step before has kept.

    Attributes:
      temperature: logits are divided by it; 0 is greedy, where filters have nothing to do.
      top_k: keeps this many best tokens, the lowest ids among equals; 0 keeps all.
      top_p: keeps the smallest set of best tokens with at least this much probability, the token
        that crosses the line included; 1 keeps all.
      min_p: keeps tokens at least this many times as likely as the best; 0 keeps all.
      repetition_penalty: logits of tokens in the prompt or the output are divided by it where
        positive and multiplied by it elsewhere (Keskar et al. 2019, as in vLLM).
      presence_penalty: subtracted from logits of tokens in the output (as OpenAI and vLLM do).
      frequency_penalty: subtracted once for each time the token is in the output (likewise).
      logit_bias: added to the logits of single tokens, a mapping or pairs; -inf bans a token.
      seed: any integer in 0..2**64-1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def __post_init__(self):
        """Checks every field.

        Raises:
          ValueError: naming the field, its value, the limit and the way out.
        """
        temperature = _number("temperature", self.temperature)
        if temperature != 0 and not 1e-6 <= temperature <= 1e6:
            raise ValueError(f"{temperature=} must be 0 or in 1e-6..1e6; use 0 for greedy decoding")
        for name, (low, high, way_out) in _RANGES.items():
            value = _number(name, getattr(self, name))
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be in {low:g}..{high:g}; {way_out}")
        if self.top_p <= 0:
            raise ValueError(f"top_p={self.top_p} must be above 0; {_RANGES['top_p'][2]}")
        if not _is_integer(self.top_k) or not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k={self.top_k!r} must be an integer in 0..{2**31 - 1}; 0 keeps every token"
            )
        if not _is_integer(self.seed) or not 0 <= self.seed < 2**64:
            raise ValueError(
                f"seed={self.seed!r} must be an integer in 0..{2**64 - 1}; take it modulo 2**64"
            )
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """Logit bias as (token id, bias) pairs in order of id."""
        return tuple(self.logit_bias)  # pyright: ignore[reportReturnType]

    @property
    def kind(self) -> SamplingKind:
        """The program these settings need."""
        if self.temperature == 0:
            method = "greedy"
        elif 0 < self.top_k <= CANDIDATES:
            method = "top_k"
        else:
            filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
            method = "full" if filtered else "plain"
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return SamplingKind(method=method, adjusted=penalties != (1, 0, 0) or bool(self.bias))


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(name: str, value: object) -> float:
    """Returns a finite float or raises ValueError naming the field."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite; leave it out for the default")
    return float(value)


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns sorted (token id, bias) pairs of a mapping or of pairs, each of them checked."""
    try:
        pairs = [(t, v) for t, v in (bias.items() if isinstance(bias, Mapping) else bias)]
    except (TypeError, ValueError):
        raise ValueError(
            f"logit_bias={bias!r} must map token ids to numbers, or be pairs of them"
        ) from None
    for token, value in pairs:
        if not _is_integer(token) or token < 0:
            raise ValueError(f"logit_bias: token {token!r} must be an id, an integer from 0")
        banned = isinstance(value, float) and value == -math.inf
        if not banned and abs(_number(f"logit_bias[{token}]", value)) > 1000:
            raise ValueError(
                f"logit_bias[{token}]={value} must be in -1000..1000; use -inf to ban a token"
            )
    if len({token for token, _ in pairs}) < len(pairs):
        raise ValueError(f"logit_bias={bias} names a token twice; give each token one bias")
    return tuple(sorted((int(token), float(value)) for token, value in pairs))
