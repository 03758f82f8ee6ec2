"""SamplingParams: accepted values, their stored form, and the errors of refused ones."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.sampling.params import SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED = [
    *[("temperature", value) for value in (NAN, INF, -0.1, 101, 10**400, "1", None, True)],
    *[("top_p", value) for value in (0, -0.5, 1.01, NAN, "0.9", None)],
    *[("top_k", value) for value in (-2, 1.5, "5", None, False)],
    *[("min_p", value) for value in (-0.01, 1.01, NAN, None)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, "1")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, None)],
    *[("repetition_penalty", value) for value in (0, -1, 1e-30, 101, NAN, None)],
    *[("seed", value) for value in (-(2**63) - 1, 2**64, 0.5, "7", True)],
    *[("n", value) for value in (0, -1, 1.5, None, 1025, 10**9)],
    *[("max_tokens", value) for value in (0, -1, 1.5, "16", True)],
    *[("min_tokens", value) for value in (-1, 1.5, None, 17)],
    *[("logprobs", value) for value in (-2, 21, 1.5, True, "5")],
    *[("prompt_logprobs", value) for value in (-1, 21, 1.5, True)],
    *[("stop", value) for value in ("", ["a", ""], [1], 5, b"a", {"a": 1})],
    *[("stop_token_ids", value) for value in ([-1], ["2"], [1.0], [True], 5, "5", [1] * 1025)],
    *[("logit_bias", value) for value in ([1], {"5.0": 1.0}, {"²": 1.0}, {-1: 1.0}, {1: NAN}, {1: "x"}, {True: 1.0})],
    *[("logit_bias", value) for value in ({"-1": 1.0}, {"9" * 5000: 1.0}, {5: 1.0, "5": 2.0}, {1: 10**400})],
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    *[("allowed_token_ids", value) for value in ([], [-1], ["2"], [True], "5", 5, {5: 1})],
    *[("bad_words", value) for value in ("abc", [""], ["  "], [5], 5, b"a", ["x"] * 513, ["x" * 1025])],
    *[("include_stop_str_in_output", value) for value in (1, None, "yes")],
    *[("ignore_eos", value) for value in (0, None)],
    *[("skip_special_tokens", value) for value in (1, "no")],
    *[("detokenize", value) for value in (1, None)],
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_bad_value_is_refused_with_the_field_the_expected_and_the_actual_value(field, value):
    with pytest.raises(RequestError, match=rf"^{re.escape(field)}.*: expected .+, got .+\."):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "seed", "stop_token_ids", "logit_bias"])
def test_a_number_that_python_does_not_write_out_is_refused_too(field):
    huge = -(10**5000)  # more digits than Python makes of an integer
    value = {"stop_token_ids": [huge], "logit_bias": {huge: 1.0}}.get(field, huge)
    with pytest.raises(RequestError, match=rf"^{field}.*, got of 16610 bits\."):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("best_of", "Use n for several answers"),
        ("use_beam_search", "Beam search is not built"),
        ("guided_json", "Use structured_outputs=StructuredOutputsParams(json=…)"),
        ("response_format", "Use structured_outputs=StructuredOutputsParams(json=…)"),
        ("max_new_tokens", "Did you mean max_tokens?"),
        ("temprature", "Did you mean temperature?"),
        ("xyz", "Known: n, temperature, top_p"),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_use_instead(name, said):
    with pytest.raises(RequestError, match=f"^{name} is no field of SamplingParams\\. {re.escape(said)}"):
        SamplingParams(**{name: 2})


def test_a_value_without_a_name_is_refused():
    with pytest.raises(RequestError, match="expected arguments by name"):
        SamplingParams(0.5)


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


def test_params_survive_pickling_copying_and_hashing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, seed=5)
    copies = [pickle.loads(pickle.dumps(params)), copy.copy(params), copy.deepcopy(params), dataclasses.replace(params)]
    assert all(one == params and hash(one) == hash(params) for one in copies)
    assert params.logit_bias == {1: 2.0} == dataclasses.asdict(params)["logit_bias"]
    assert hash(params) != hash(dataclasses.replace(params, logit_bias={1: 3}))


def test_nothing_that_params_hold_can_be_changed():
    params = SamplingParams(logit_bias={1: 1.0}, stop_token_ids=[1], stop=["a"])
    for change in ("params.logit_bias[1] = 1e9", "del params.logit_bias[1]", "params.logit_bias.clear()"):
        with pytest.raises((TypeError, AttributeError)):
            exec(change)
    with pytest.raises(AttributeError):
        params.stop_token_ids.append(-1)


def test_allowed_tokens_and_bad_words_are_kept_in_one_form():
    params = SamplingParams(allowed_token_ids=[5, np.int64(3), 5], bad_words=["a", " b"])
    assert (params.allowed_token_ids, params.bad_words) == ((3, 5), ("a", " b"))
    assert (SamplingParams().allowed_token_ids, SamplingParams(bad_words=[]).bad_words) == (None, ())


def test_a_bias_past_100_counts_as_100_and_jsons_texts_are_ids():
    params = SamplingParams(logit_bias={"15": 1e9, 3: -INF, 4: -100.5, 5: 99.5})
    assert params.logit_bias == {15: 100.0, 3: -100.0, 4: -100.0, 5: 99.5}


@pytest.mark.parametrize("top_p", [1e-300, 5e-324, 1e-46, 1e-40])
def test_a_top_p_that_float32_has_not_is_kept_as_the_least_that_it_has(top_p):
    kept = SamplingParams(top_p=top_p).top_p
    assert np.float32(kept) == np.finfo(np.float32).tiny


def test_a_limit_that_python_does_not_write_out_raises_no_second_error():
    params = SamplingParams(max_tokens=10**5000, top_k=10**5000)
    assert params.max_tokens == params.top_k == 2**31 - 1
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=10**5000, min_tokens="x")


def test_one_of_several_answers_has_its_own_seed_and_is_not_checked_again():
    params = SamplingParams(n=3, seed=2**63 - 2, prompt_logprobs=1, logit_bias={1: 2})
    first, *_, last = [params.of_answer(index) for index in range(3)]
    assert (first.n, first.seed, first.prompt_logprobs) == (1, 2**63 - 2, 1)
    assert (last.n, last.seed, last.prompt_logprobs) == (1, 0, None)
    assert last.logit_bias is params.logit_bias
    assert (params.n, params.seed) == (3, 2**63 - 2)


def test_several_greedy_answers_are_refused_as_they_would_be_equal():
    with pytest.raises(RequestError, match="n: expected 1 when temperature is 0, got 2"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ([str(number) for number in range(65)], r"stop: expected at most 64 texts, got 65\. Look for"),
        (["x"] * 10**6, "stop: expected at most 64 texts, got 1000000"),
        ("x" * 4097, "stop: expected texts of at most 4096 characters together, got 4097"),
        (["x" * 2048, "y" * 2048, "z"], "stop: expected texts of at most 4096 characters together, got 4097"),
    ],
)
def test_more_stop_texts_than_cost_the_neighbours_nothing_are_refused(stop, said):
    with pytest.raises(RequestError, match=said):
        SamplingParams(stop=stop)


def test_as_many_stop_texts_as_may_be_are_taken():
    assert len(SamplingParams(stop=[chr(97 + number) * 64 for number in range(64)]).stop) == 64
    assert SamplingParams(stop="x" * 4096).stop == ("x" * 4096,)


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
def test_token_ids_past_the_vocabulary_are_refused_on_arrival(params):
    params.check_vocab(10)
    with pytest.raises(RequestError, match=r"expected token ids under 9, .*got 9"):
        params.check_vocab(9)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_the_vocabulary_has_are_refused_on_arrival(field):
    params = SamplingParams(**{field: 5})
    params.check_vocab(5)
    with pytest.raises(RequestError, match=rf"^{field}: expected at most 4, .*got 5"):
        params.check_vocab(4)


def test_log_probabilities_of_a_whole_vocabulary_are_bounded_on_arrival():
    SamplingParams(logprobs=-1, max_tokens=512).check_vocab(2**17)
    for more in ({"max_tokens": 513}, {"max_tokens": None}, {"max_tokens": 257, "n": 2}):
        with pytest.raises(RequestError, match=r"^logprobs: expected n \* max_tokens of at most 512 with -1"):
            SamplingParams(logprobs=-1, **more).check_vocab(2**17)
