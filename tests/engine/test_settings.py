import math

import pytest

from openjet_jax.settings import Sampling, SamplingKind


@pytest.mark.parametrize(
    "settings, method, adjusted",
    [
        ({}, "greedy", False),
        ({"top_k": 40, "top_p": 0.9}, "greedy", False),
        ({"repetition_penalty": 1.1}, "greedy", True),
        ({"temperature": 1.0}, "plain", False),
        ({"temperature": 1.0, "logit_bias": {4: 1.0}}, "plain", True),
        ({"temperature": 1.0, "top_k": 64, "top_p": 0.9}, "top_k", False),
        ({"temperature": 1.0, "top_k": 65}, "full", False),
        ({"temperature": 1.0, "top_p": 0.9}, "full", False),
        ({"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 0.1}, "full", True),
    ],
)
def test_settings_name_the_program_they_need(settings, method, adjusted):
    sampling = Sampling(**settings)
    assert sampling.kind == SamplingKind(method=method, adjusted=adjusted)
    assert sampling.kind.draft.method == ("top_k" if method == "full" else method)
    assert hash(sampling) == hash(Sampling(**settings))


def test_a_bias_may_be_a_mapping_or_pairs_in_any_order():
    pairs = Sampling(logit_bias=((7, 1.0), (2, -math.inf)))
    assert pairs == Sampling(logit_bias={2: -math.inf, 7: 1})
    assert pairs.logit_bias == ((2, -math.inf), (7, 1.0))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e-9}, "greedy"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"frequency_penalty": 1e9}, "frequency_penalty=1000000000.0"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"logit_bias": {"a": 1.0}}, "token 'a'"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\]=nan"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\]=inf"),
        ({"logit_bias": {1: 1e6}}, r"logit_bias\[1\]=1000000.0"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "twice"),
        ({"logit_bias": [1, 2]}, "pairs"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": True}, "seed=True"),
    ],
)
def test_refused_settings_name_the_value(settings, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**settings)
