"""From a request's fields to the engine's settings of sampling."""

import secrets
from typing import Any

from openjet_jax.loading import Model
from openjet_jax.server.errors import bad_request
from openjet_jax.server.requests import GenerationRequest
from openjet_jax.settings import Sampling

# As the engine calls them, and as a model's file does.
_OF_THE_FILE = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def samplings_of(model: Model, request: GenerationRequest) -> tuple[Sampling, ...]:
    """Returns the settings of each of a request's answers; their seeds follow one another.

    What the request leaves out is as the model's file recommends, else as OpenAI has it. Without
    a seed one is drawn.

    Raises:
      ApiError: 400; a bias is off.
    """
    facts = model.facts.get("sampling") or {}
    settings: dict[str, Any] = {"temperature": 1.0}
    settings |= {name: facts[key] for name, key in _OF_THE_FILE.items() if key in facts}
    for name in (*_OF_THE_FILE, *_PENALTIES):
        if (value := getattr(request, name)) is not None:
            settings[name] = value
    seed = request.seed if request.seed is not None else secrets.randbits(63)
    bias = _bias(request.logit_bias or {}, model.config.vocab_used)
    return tuple(
        Sampling(**settings, logit_bias=bias, seed=(seed + i) % 2**64)
        for i in range(request.n or 1)
    )


def _bias(given: dict[str, float], vocab_used: int) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise bad_request(f"logit_bias: {token!r} is no token id", "logit_bias")
        if int(token) >= vocab_used:
            raise bad_request(f"logit_bias: token {token} must be below {vocab_used}", "logit_bias")
        if not -100 <= value <= 100:
            raise bad_request(f"logit_bias: {value} must be in -100..100", "logit_bias")
        bias[int(token)] = value
    return bias
