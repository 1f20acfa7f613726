"""The likeliest tokens beside each: of the model's own distribution, whatever was drafted."""

import numpy as np
import pytest
from golden import case, fixed

import openjet_jax as oj
from openjet_jax.dispatches import TopLogprobs
from openjet_jax.settings import Sampling

NAME = "q8_0"
TOP, COUNT = 5, 24


def ranked(depth: int) -> tuple[list[int], list[float], list[TopLogprobs]]:
    """Returns greedy tokens, their log-probabilities, and what stands beside them."""
    model = case(NAME)
    conversation = model.conversation(model.answers["tokens"])
    bursts = list(
        conversation.run(Sampling(), fixed(depth, model), max_new_tokens=COUNT, top_logprobs=TOP)
    )
    tokens = [token for burst in bursts for token in burst.token_ids]
    logprobs = [logprob for burst in bursts for logprob in burst.logprobs]
    return tokens, logprobs, [top for burst in bursts for top in burst.top_logprobs]


@pytest.mark.parametrize("depth", [0, 5])
def test_they_are_those_of_the_logits_at_every_position(depth):
    model = case(NAME)
    prompt = model.answers["tokens"]
    tokens, logprobs, tops = ranked(depth)
    assert tokens == model.answers["greedy"][:COUNT].tolist() and len(tops) == COUNT
    padded = np.zeros(193, np.int32)
    padded[: len(prompt) + COUNT] = [*prompt, *tokens]
    _, hidden = model.programs.prefill(192)(
        model.weights, model.programs.start()(), padded, np.int32(len(prompt) + COUNT)
    )
    logits = np.asarray(model.programs.logits(192)(model.weights, hidden), np.float64)
    logits = logits[len(prompt) - 1 : len(prompt) - 1 + COUNT, : model.config.vocab_used]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-log_p, axis=1, kind="stable")[:, :TOP]
    assert [[token for token, _ in top] for top in tops] == order.tolist()
    values = [[logprob for _, logprob in top] for top in tops]
    np.testing.assert_allclose(values, np.take_along_axis(log_p, order, 1), atol=1e-4)
    assert [top[0] for top in tops] == list(zip(tokens, logprobs, strict=True))


def test_nothing_is_reported_unless_asked_for_and_too_many_are_refused():
    model = oj.load("tiny")
    for wrong in (-1, 21):
        with pytest.raises(ValueError, match="must be in 0..20; 0 reports none"):
            oj.generate(model, "a", top_logprobs=wrong)
    conversation = case(NAME).conversation([1, 2, 3])
    (burst,) = conversation.run(Sampling(), fixed(5, case(NAME)), max_new_tokens=1)
    assert burst.top_logprobs == []
