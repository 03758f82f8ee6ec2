"""Log-probabilities by mode, and kept tokens, against Transformers' warpers on the same logits."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mllm_compile.runtime.config_sections import LOGPROBS_MODES
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.scored import packed_bits
from tests.runtime.sampling.sampling_cases import PROMPT, VOCAB, make_state, random_logits, sample

CASES = {
    "greedy": SamplingParams(temperature=0, top_p=0.3, top_k=4),
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.4, top_k=12),
    "all filters": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02),
    "bias": SamplingParams(temperature=0.8, top_p=0.9, logit_bias={5: 4.0, 299: 4.0}),
    "greedy with penalties": SamplingParams(temperature=0, repetition_penalty=1.5),
    "penalties": SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.5),
    "allowed": SamplingParams(temperature=0.7, top_k=3, allowed_token_ids=list(range(0, VOCAB, 7))),
}


def expected(params: SamplingParams, logits: torch.Tensor, mode: str) -> torch.Tensor:
    """[V] log-probabilities of a first token by the mode's definition."""
    if mode == "raw_logprobs":
        return logits.log_softmax(-1)
    scores = logits.clone()
    for token_id, bias in (params.logit_bias or {}).items():
        scores[token_id] += bias
    warpers = LogitsProcessorList()
    if params.repetition_penalty != 1:
        warpers.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.is_greedy:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.allowed_token_ids is not None and params.allowed_token_ids:
        forbidden = torch.ones(VOCAB, dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
        scores[forbidden] = -torch.inf
    if mode == "processed_logprobs" and not params.is_greedy:
        warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    return warpers(torch.tensor([PROMPT]), scores[None])[0].log_softmax(-1)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_of_the_distribution_that_the_mode_names(name, mode):
    params = replace(CASES[name], logprobs=2, logprobs_mode=mode)
    logits = random_logits(1, seed=3)
    output = sample(make_state(params), logits, [1], [4])
    reference = expected(params, logits[0], mode)
    token = int(output.token_ids[0])
    assert float(output.logprobs.logprobs[0]) == pytest.approx(float(reference[token]), abs=1e-5)
    torch.testing.assert_close(output.logprobs.top_logprobs[0], reference.topk(2).values, atol=1e-5, rtol=0)
    assert int(output.logprobs.ranks[0]) == 1 + int((reference > reference[token]).sum())


def test_a_crowd_of_modes_changes_no_bit_of_a_row():
    crowd = [
        replace(params, logprobs=3, logprobs_mode=LOGPROBS_MODES[index % 3], seed=index)
        for index, params in enumerate(list(CASES.values()) * 3)
    ]
    rows = list(range(1, len(crowd) + 1))
    logits = random_logits(len(crowd), seed=5)
    together = sample(make_state(*crowd), logits, rows, [4] * len(crowd))
    for index, params in enumerate(crowd):
        alone = sample(make_state(params), logits[index : index + 1], [1], [4])
        assert torch.equal(alone.token_ids[0], together.token_ids[index])
        for field in ("logprobs", "ranks", "top_logprobs"):
            ours, theirs = getattr(alone.logprobs, field)[0], getattr(together.logprobs, field)[index]
            assert torch.equal(ours, theirs), (index, field)


def test_a_request_without_a_mode_has_the_engines():
    params, logits = SamplingParams(temperature=0.5, logprobs=0), random_logits(1)
    state = make_state()
    state.set_request(1, params, PROMPT, 7, default_mode="processed_logprobs")
    named = make_state(replace(params, logprobs_mode="processed_logprobs", seed=7))
    raw = make_state(replace(params, seed=7))
    ours, theirs, others = (sample(one, logits, [1], [4]).logprobs.logprobs for one in (state, named, raw))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, others)


def test_kept_tokens_are_those_that_filters_keep():
    params = SamplingParams(temperature=1.5, top_k=40, top_p=0.9, logprobs=0, return_sampling_mask=True)
    logits = random_logits(1, seed=9)
    output = sample(make_state(params), logits, [1], [4])
    is_kept = output.scores.filtered[:, :VOCAB] > -torch.inf
    assert torch.equal(is_kept[0], expected(params, logits[0], "processed_logprobs") > -torch.inf)
    assert 1 < int(is_kept.sum()) <= 40


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("width", [1, 8, 300])
def test_packed_bits_are_what_numpy_unpacks(width, rows):
    import numpy as np

    bits = torch.rand(rows, width, generator=torch.Generator().manual_seed(0)) < 0.5
    assert np.array_equal(np.unpackbits(packed_bits(bits).numpy(), axis=1)[:, :width], bits.numpy())


def test_flags_have_the_modes_of_requests_that_want_log_probabilities():
    state = make_state(
        SamplingParams(logprobs=0, logprobs_mode="processed_logprobs"),
        SamplingParams(logprobs_mode="tempered_logprobs"),
        SamplingParams(logprobs=1),
    )
    assert state.flags.modes == ("raw_logprobs", "processed_logprobs")
    state.clear(3)
    assert state.flags.modes == ("processed_logprobs",)
