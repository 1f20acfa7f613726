"""The draft depth: what settings mean, and an automatic choice close to the best fixed one."""

import functools

import numpy as np
import pytest
from golden import WithinDeepest, case

from openjet_jax.config import MAX_DEPTH
from openjet_jax.depth import AutoDepth, CycleTime, DepthPolicy, parse_depth
from openjet_jax.settings import Sampling

# Share of drafts that survive, by position, as `Stats` counts it: greedy code (the bundled model's
# card), chat with reasoning (3.1 to 3.3 tokens a cycle at three drafts are published for the 27B
# model), and a story (2.1 tokens a cycle at four drafts: 70.7 tokens/s on a 3090).
CLASSES = {
    "code": (0.93, 0.87, 0.82, 0.77, 0.72),
    "reasoning": (0.87, 0.72, 0.58, 0.47, 0.38),
    "story": (0.55, 0.30, 0.15, 0.08, 0.04),
}
MIXTURES = {name: (shares,) for name, shares in CLASSES.items()} | {
    "code, then a story": (CLASSES["code"], CLASSES["story"]),
    "a story, then code": (CLASSES["story"], CLASSES["code"]),
}

# Milliseconds of a cycle without drafts, and of a draft. 3090: 42.9 tokens/s of plain decoding and
# 139.7 at four drafts, as published. H200: two thirds of the bandwidth limit of 3.4 ms, and an MTP
# block with a listed head at the same rate. Dear: llama.cpp on an H200, 75.6 tokens/s of plain
# decoding and 27.4 ms at four drafts.
COSTS = {"3090": (24.0, 1.5), "h200": (5.0, 0.3), "dear": (13.2, 3.5)}
CYCLES = 4


class Fixed:
    def __init__(self, depth: int):
        self.depth = depth

    def observe(self, cycles, seconds):
        pass

    def choose(self):
        return self.depth


def generate(policy, classes, costs, tokens, seed) -> float:
    """Returns the milliseconds that some tokens take.

    What the policy sees of them is noisy: 3 % of each dispatch, every fiftieth held up, the first
    one much too long.
    """
    rng = np.random.default_rng(seed)
    base, draft = costs
    total, made, drafted, depth, first = 0.0, 0, 0, policy.depth, True
    while made < tokens:
        shares = classes[made * len(classes) // tokens]
        cycles, milliseconds = [], 0.0
        for _ in range(1 if first else CYCLES):
            u = rng.random()
            accepted = sum(u < share for share in shares[:drafted])
            cycles.append((drafted, accepted))
            made += accepted + 1
            milliseconds += base + draft * depth
            drafted = depth
        total += milliseconds
        noise = rng.normal(1, 0.03) * (3 if rng.random() < 0.02 else 1)
        policy.observe(cycles, milliseconds * noise + 500 * first)
        depth, first = policy.choose(), False
    return total


def mean_time(make, classes, costs, tokens, runs=12) -> float:
    return float(np.mean([generate(make(), classes, costs, tokens, i) for i in range(runs)]))


def best_fixed(classes, costs, tokens) -> float:
    times = [
        mean_time(functools.partial(Fixed, depth), classes, costs, tokens)
        for depth in range(MAX_DEPTH + 1)
    ]
    return min(times)


@pytest.mark.parametrize("device", ["3090", "h200"])
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("tokens", [256, 1024])
def test_auto_is_within_5_percent_of_the_best_fixed_depth(device, name, tokens):
    classes, costs = MIXTURES[name], COSTS[device]
    best = best_fixed(classes, costs, tokens)
    assert mean_time(lambda: AutoDepth(3), classes, costs, tokens) < 1.05 * best
    # The next requests know the times.
    times = CycleTime()
    generate(AutoDepth(3, times), MIXTURES["story"], costs, 256, seed=99)
    assert mean_time(lambda: AutoDepth(3, times), classes, costs, tokens) < 1.05 * best


@pytest.mark.parametrize("name", CLASSES)
def test_auto_is_within_5_percent_where_drafts_are_dear(name):
    classes, costs = MIXTURES[name], COSTS["dear"]
    best = best_fixed(classes, costs, 1024)
    assert mean_time(lambda: AutoDepth(3), classes, costs, 1024) < 1.05 * best


def test_a_policy_that_never_moves_is_not_within_5_percent():
    for name, depth in (("story", 5), ("code", 1)):
        classes, costs = MIXTURES[name], COSTS["dear"]
        fixed = mean_time(lambda depth=depth: Fixed(depth), classes, costs, 1024)
        assert fixed > 1.05 * best_fixed(classes, costs, 1024)


def test_cycle_times_of_depths_never_tried_are_known_from_others():
    rng, times = np.random.default_rng(0), CycleTime()
    for depth in (5, 2, *[3] * 20):
        times.observe(depth, 1e-3 * (24 + 1.5 * depth) * rng.normal(1, 0.01))
    for depth in range(MAX_DEPTH + 1):
        assert times(depth) == pytest.approx(1e-3 * (24 + 1.5 * depth), rel=0.03)


def test_one_dispatch_that_is_held_up_is_not_believed():
    times = CycleTime()
    for depth in (5, 2, *[3] * 10):
        times.observe(depth, 24 + 1.5 * depth)
    times.observe(3, 1000.0)
    assert times(3) == pytest.approx(28.5, rel=0.1)
    for _ in range(40):
        times.observe(3, 57.0)  # but one that lasts is
    assert times(3) == pytest.approx(57.0, rel=0.02)


def test_the_first_time_of_a_program_is_not_a_measurement():
    policy = AutoDepth(3)
    policy.observe([(0, 0)], 100.0)
    assert policy.times.count == 0
    policy.observe([(3, 1)] * 4, 4.0)
    assert policy.times.count == 1 and policy.times(3) == pytest.approx(1.0)


def test_expected_tokens_come_to_be_those_that_cycles_emit():
    policy, shares, rng = AutoDepth(3), CLASSES["reasoning"], np.random.default_rng(0)
    for _ in range(2000):
        u = rng.random()
        policy.observe([(5, sum(u < share for share in shares))], 1.0)
    for depth in range(MAX_DEPTH + 1):
        assert policy.tokens(depth) == pytest.approx(1 + sum(shares[:depth]), rel=0.15)


def test_a_depth_that_was_left_is_tried_again_when_shallow_drafts_do_better():
    times = CycleTime()
    for depth in (5, 2):
        times.observe(depth, 24 + 1.5 * depth)
    policy = AutoDepth(5, times)
    for _ in range(50):
        policy.observe([(5, 0)] * 4, 4 * 31.5)
    assert policy.choose() == 0
    for _ in range(20):
        policy.observe([(0, 0)] * 4, 4 * 24.0)
    assert policy.choose() > 0  # what was seen of drafts is old by now
    policy.depth = 1
    for _ in range(60):
        policy.observe([(1, 1)] * 4, 4 * 25.5)
    assert policy.choose() == MAX_DEPTH


@pytest.mark.parametrize(
    ("text", "depth", "after_rejection", "auto"),
    [(4, 4, 4, False), ("0", 0, 0, False), ("4/3", 4, 3, False), ("auto", 3, 3, True)],
)
def test_a_setting_names_a_policy(text, depth, after_rejection, auto):
    policy = parse_depth(text)
    assert policy == DepthPolicy(depth=depth, after_rejection=after_rejection, auto=auto)
    assert policy.max_depth == (MAX_DEPTH if auto else depth)


@pytest.mark.parametrize(
    "text", ["6", "-1", "4/", "/3", "4/3/2", "fast", "", 2.5, None, "4/9", "3/4"]
)
def test_what_is_no_depth_is_refused(text):
    with pytest.raises(ValueError, match=r"0\.\.[345]"):
        parse_depth(text)


@pytest.mark.parametrize(("depth", "after"), [(4, 3), (4, 1)])
def test_the_cycle_after_a_rejection_makes_the_other_number_of_drafts(depth, after):
    model = case("q8_0")
    conversation = model.conversation(model.answers["tokens"])
    policy = WithinDeepest(depth=depth, after_rejection=after)
    bursts = list(conversation.run(Sampling(), policy, max_new_tokens=48))
    cycles = [cycle for burst in bursts for cycle in burst.cycles]
    kept = [accepted == drafted for drafted, accepted in cycles]
    assert cycles[0] == (0, 0) and not all(kept) and any(kept[1:])
    for whole, (drafted, _) in zip(kept, cycles[1:], strict=False):
        assert drafted == (depth if whole else after)
    text = [token for burst in bursts for token in burst.token_ids]
    assert text[: len(model.answers["greedy"])] == model.answers["greedy"].tolist()


def test_automatic_depth_keeps_what_it_measured_for_the_next_request():
    model = case("q8_0")
    counts = []
    for _ in range(2):
        conversation = model.conversation(model.answers["tokens"])
        policy = DepthPolicy(depth=3, after_rejection=3, auto=True)
        bursts = list(conversation.run(Sampling(), policy, max_new_tokens=40))
        text = [token for burst in bursts for token in burst.token_ids]
        assert text[: len(model.answers["greedy"])] == model.answers["greedy"].tolist()
        counts.append(model.programs.cycle_times[Sampling().kind].count)
    assert 0 < counts[0] < counts[1]
