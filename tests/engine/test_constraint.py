"""A constraint holds at every row: constrained text is legal and independent of drafts."""

import jax.numpy as jnp
import numpy as np
import pytest

import openjet_jax as oj
from openjet_jax.config import ROWS
from openjet_jax.sampling import mask_words, restrict


class Alternating:
    """Even and odd ids by turns; it counts how often a draft was legal."""

    def __init__(self, vocab: int):
        self.vocab, self.parity, self.seen = vocab, 0, 0

    def masks(self, drafts):
        bits = np.zeros((ROWS, 32 * mask_words(self.vocab)), np.uint8)
        for row in range(ROWS):
            bits[row, (self.parity + row) % 2 : self.vocab : 2] = 1
        self.seen += len(drafts)
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def advance(self, token_ids):
        self.parity = (self.parity + len(token_ids)) % 2


@pytest.mark.parametrize("width", [5, 32, 70])
def test_a_token_is_kept_if_and_only_if_its_bit_is_set(width: int):
    rng = np.random.default_rng(width)
    keep = rng.random((ROWS, width)) < 0.5
    padded = np.zeros((ROWS, 32 * mask_words(width)), np.uint8)
    padded[:, :width] = keep
    allowed = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    logits = np.asarray(rng.normal(size=(ROWS, width)), np.float32)
    restricted = np.asarray(restrict(jnp.asarray(logits), jnp.asarray(allowed)))
    np.testing.assert_array_equal(restricted, np.where(keep, logits, -np.inf))


def test_constrained_text_is_legal_and_the_same_at_every_depth():
    model = oj.load("tiny")
    texts = []
    for depth in (0, 5):
        constraint = Alternating(model.config.vocab)
        out = oj.generate(
            model,
            "def area(width, height):\n",
            depth=depth,
            max_new_tokens=24,
            stop_ids=[],
            context=1024,
            constraint=constraint,
        )
        texts.append(out.token_ids.tolist())
        assert (constraint.seen > 0) == (depth > 0)
    assert texts[0] == texts[1]
    assert [token % 2 for token in texts[0]] == [i % 2 for i in range(24)]
