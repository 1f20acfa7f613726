"""On an NVIDIA GPU: the reference stays exact, and the kernels agree with it at every depth."""

import json
import os
import pathlib

import jax
import numpy as np
import pytest
from golden import WithinDeepest, case, greedy, relative_rms

import openjet_jax as oj
from openjet_jax.conversation import Conversation
from openjet_jax.engine import programs_for

pytestmark = pytest.mark.gpu

PROMPTS = [
    "def fibonacci(n):\n",
    "class Stack:\n",
    "import os\nimport sys\n\n\ndef main():\n",
    'def merge(a, b):\n    """Merge two sorted lists."""\n',
]
# Kernels round activations to float16 (relative 2^-12); texts may part where the top two logits
# are closer than this.
MARGIN = 0.25


@pytest.fixture(scope="module")
def reference():
    return oj.load("tiny", backend="reference")


@pytest.fixture(scope="module")
def kernels():
    return oj.load("tiny", backend="mosaic")


def text(model, ids, depth, count=64, sampling=None, kv_dtype="float32"):
    programs = programs_for(model, 512, kv_dtype)
    conversation = Conversation(model.weights, programs)
    conversation.read(ids)
    policy = WithinDeepest(depth=depth, after_rejection=depth)
    bursts = conversation.run(sampling or oj.Sampling(), policy, max_new_tokens=count)
    return [token for burst in bursts for token in burst.token_ids]


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_the_device_is_one_the_kernels_are_for():
    assert jax.devices()[0].compute_capability == "9.0"


def test_kernels_agree_with_the_reference_teacher_forced(reference, kernels):
    """Mean KL at most 1e-3, top-1 equal wherever the reference's margin is at least MARGIN."""
    found = {}
    for prompt in PROMPTS:
        ids = reference.tokenizer.encode(prompt)
        ids = [*ids, *text(reference, ids, 0)]
        ours = log_softmax(oj.score(kernels, ids)["logits"])
        theirs = log_softmax(oj.score(reference, ids)["logits"])
        kl = (np.exp(theirs) * (theirs - ours)).sum(-1)
        top = np.sort(theirs, -1)
        clear = top[:, -1] - top[:, -2] >= MARGIN
        agree = ours.argmax(-1) == theirs.argmax(-1)
        found[prompt] = (float(kl.mean()), float(kl.max()), float(agree.mean()))
        assert kl.mean() < 1e-3 and kl.max() < 3e-2
        assert agree[clear].all()
    out = os.environ.get("OUT")
    if out:
        pathlib.Path(out, "tiny_kernels_against_reference.json").write_text(json.dumps(found))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_kernels_give_a_reply_the_probabilities_of_the_reference(reference, kernels, kv_dtype):
    """Compares as far as both choose the same tokens, which is nearly always to the end."""
    compared = 0
    for prompt in PROMPTS:
        ids = reference.tokenizer.encode(prompt)
        replies = []
        for model in (reference, kernels):
            conversation = Conversation(model.weights, programs_for(model, 512, kv_dtype))
            conversation.read(ids)
            policy = WithinDeepest(depth=3, after_rejection=3)
            bursts = list(conversation.run(oj.Sampling(), policy, max_new_tokens=64))
            tokens = [token for burst in bursts for token in burst.token_ids]
            replies.append((tokens, [x for burst in bursts for x in burst.logprobs]))
        (ours, our_logprobs), (theirs, their_logprobs) = replies
        pairs = zip(ours, theirs, strict=False)
        same = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(ours))
        difference = np.subtract(our_logprobs[:same], their_logprobs[:same])
        assert np.abs(difference).max(initial=0) < 0.1
        compared += same
    assert compared > 100


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "q8_0"])
def test_text_is_the_same_at_every_depth_with_the_kernels(kernels, kv_dtype):
    sampled = oj.Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=5)
    for prompt in PROMPTS[:2]:
        ids = kernels.tokenizer.encode(prompt)
        for sampling in (oj.Sampling(), sampled):
            texts = [
                text(kernels, ids, depth, sampling=sampling, kv_dtype=kv_dtype)
                for depth in (0, 1, 3, 5)
            ]
            assert all(other == texts[0] for other in texts)


def test_text_is_the_same_at_every_depth_with_the_reference(reference):
    ids = reference.tokenizer.encode(PROMPTS[0])
    texts = [text(reference, ids, depth) for depth in (0, 2, 5)]
    assert all(other == texts[0] for other in texts)


def test_the_reference_gives_the_golden_answers(reference):
    for name in ("q8_0", "iq4_nl_recr"):
        model = case(name)
        ids = model.answers["tokens"]
        tokens = np.zeros(193, np.int32)
        tokens[: len(ids)] = ids
        run = model.programs.prefill(192)
        state, hidden = run(model.weights, model.programs.start()(), tokens, np.int32(len(ids)))
        assert relative_rms(hidden[: len(ids)], model.answers["hidden"]) < 1e-5
        depth = 3 if model.config.has_mtp else 0
        assert greedy(model, ids, depth, 24)[0] == model.answers["greedy"].tolist()
