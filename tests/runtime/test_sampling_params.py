"""SamplingParams: what is accepted, what it is kept as, and what is refused in which words."""

import dataclasses
import pickle
import re

import numpy as np
import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED = [
    *[("temperature", value) for value in (NAN, INF, -0.1, 101, 10**400, "1", None, True)],
    *[("top_p", value) for value in (0, -0.5, 1.01, NAN, "0.9", None)],
    *[("top_k", value) for value in (-2, 1.5, "5", None, False)],
    *[("min_p", value) for value in (-0.01, 1.01, NAN, None)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, "1")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, None)],
    *[("repetition_penalty", value) for value in (0, -1, 1e-30, 101, NAN, None)],
    *[("seed", value) for value in (-2, 2**63, 0.5, "7", True)],
    *[("n", value) for value in (0, -1, 1.5, None, 10**9)],
    *[("max_tokens", value) for value in (0, -1, 1.5, "16", True)],
    *[("min_tokens", value) for value in (-1, 1.5, None, 17)],
    *[("logprobs", value) for value in (-1, 21, 1.5, True, "5")],
    *[("prompt_logprobs", value) for value in (-1, 21, 1.5, True)],
    *[("stop", value) for value in ("", ["a", ""], [1], 5, b"a", {"a": 1})],
    *[("stop_token_ids", value) for value in ([-1], ["2"], [1.0], [True], 5, "5", [1] * 1025)],
    *[("logit_bias", value) for value in ([1], {"5": 1.0}, {-1: 1.0}, {1: NAN}, {1: 101}, {1: "x"}, {True: 1.0})],
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    *[("include_stop_str_in_output", value) for value in (1, None, "yes")],
    *[("ignore_eos", value) for value in (0, None)],
    *[("skip_special_tokens", value) for value in (1, "no")],
    *[("detokenize", value) for value in (1, None)],
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_bad_value_is_refused_with_the_field_what_was_expected_and_what_came(field, value):
    with pytest.raises(RequestError, match=rf"^{re.escape(field)}.*: expected .+, got .+\."):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "seed", "stop_token_ids", "logit_bias"])
def test_a_number_that_python_does_not_write_out_is_refused_too(field):
    huge = -(10**5000)  # more digits than Python makes of an integer
    value = {"stop_token_ids": [huge], "logit_bias": {huge: 1.0}}.get(field, huge)
    with pytest.raises(RequestError, match=rf"^{field}.*, got of 16610 bits\."):
        SamplingParams(**{field: value})


def test_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert not params.is_greedy
    assert not params.has_penalties


def test_values_are_kept_in_one_form():
    params = SamplingParams(
        top_k=-1,
        seed=-1,
        stop="end",
        stop_token_ids=[np.int64(3)],
        logit_bias={np.int32(4): np.float32(1)},
        temperature=1,
    )
    assert (params.top_k, params.seed, params.stop, params.stop_token_ids) == (0, None, ("end",), (3,))
    assert params.logit_bias == {4: 1.0}
    assert type(params.temperature) is float
    assert SamplingParams(stop=None).stop == () == SamplingParams(stop=[]).stop
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_params_are_frozen_and_a_changed_copy_is_checked_again():
    params = SamplingParams(stop=["a"], logit_bias={1: 2})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0
    assert dataclasses.replace(params, temperature=0).is_greedy
    with pytest.raises(RequestError, match="temperature"):
        dataclasses.replace(params, temperature=-1)


def test_a_users_own_dict_changed_later_changes_nothing():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1e9
    assert params.logit_bias == {1: 1.0}


def test_params_survive_pickling():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, seed=5)
    assert pickle.loads(pickle.dumps(params)) == params


def test_several_greedy_answers_are_refused_as_they_would_be_equal():
    with pytest.raises(RequestError, match="n: expected 1 when temperature is 0, got 2"):
        SamplingParams(n=2, temperature=0)


def test_stop_texts_without_text_are_refused():
    with pytest.raises(RequestError, match="stop: expected no stop texts when detokenize is False"):
        SamplingParams(stop="a", detokenize=False)


def test_min_tokens_may_equal_max_tokens_and_is_free_without_one():
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=999, max_tokens=None).min_tokens == 999


def test_numbers_that_no_vocabulary_and_no_context_reaches_fit_the_devices_tables():
    params = SamplingParams(top_k=10**30, min_tokens=2**63, max_tokens=2**64)
    assert params.top_k == params.min_tokens == 2**31 - 1


@pytest.mark.parametrize("params", [SamplingParams(stop_token_ids=[9]), SamplingParams(logit_bias={9: 1.0})])
def test_token_ids_past_the_vocabulary_are_refused_at_the_door(params):
    params.check_vocab(10)
    with pytest.raises(RequestError, match=r"expected token ids under 9, .*got 9"):
        params.check_vocab(9)
