"""Log-probabilities of each mode on every path of a step, against the model's logits of the whole sequence."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.sampling.logit_filters import filter_scores
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from mllm_compile.runtime.step.runner import StepRunner
from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner
from tests.runtime.step import test_captured_verify
from tests.runtime.step.decode_loop_cases import LoopedRunner
from tests.runtime.step.test_verify_steps import PROMPTS, ReplayingDrafter

RAW, TEMPERED, PROCESSED = "raw_logprobs", "tempered_logprobs", "processed_logprobs"
REQUESTS = [
    {"logprobs": 0},
    {"logprobs": 1, "temperature": 0.6, "logprobs_mode": RAW},
    {"logprobs": 0, "temperature": 0.6, "logprobs_mode": TEMPERED},
    {"logprobs": -1, "temperature": 1.7, "logprobs_mode": PROCESSED},
]
FILTERED = [
    *REQUESTS,
    {"logprobs": 2, "temperature": 1.3, "top_p": 0.7, "logprobs_mode": PROCESSED, "return_sampling_mask": True},
    {"logprobs": 0, "temperature": 1.3, "top_k": 5, "logprobs_mode": TEMPERED, "return_sampling_mask": True},
    {"logprobs": -1, "temperature": 0.9, "top_k": 5, "logprobs_mode": PROCESSED},
]


def requests_of(params):
    return [{"prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": 9} | one for index, one in enumerate(params)]


def by_paths(path: str, requests: list[dict]):
    """The requests, served on one path of steps."""
    if path == "captured verify":
        plain = test_captured_verify.serve(requests)
        answers = {tuple(one.prompt_token_ids): one.output_token_ids for one in plain.requests}
        drafter = TextDrafter(ReplayingDrafter(answers, "random"))
        section = test_captured_verify.section_of(method="suffix")
        return test_captured_verify.serve(requests, section, drafter), test_captured_verify.Repeats()
    runner, speculation = make_runner(), None
    if path == "verify":
        plain, _ = by_paths("forward", requests)
        answers = {tuple(one.prompt_token_ids): one.output_token_ids for one in plain.requests}
        drafter = TextDrafter(ReplayingDrafter(answers, "random"))
        speculation = Speculation(drafter=drafter, num_tokens=3, vocab_size=VOCAB)
    loop = Loop(runner, False, speculation)
    if path == "decode loop":
        loop.steps = StepRunner(LoopedRunner(runner, 100), Sampler())
    loop.requests = [loop.add(**one) for one in requests]
    loop.run()
    return loop, TinyModel()


def scores_of(params, logits: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == RAW or params.is_greedy:
        return logits
    scores = logits / params.temperature
    if mode == TEMPERED:
        return scores
    top_ks, top_ps = torch.tensor([params.top_k]), torch.tensor([params.top_p])
    return filter_scores(scores[None].contiguous(), top_ks, top_ps, None)[0]


@pytest.mark.parametrize("params", [REQUESTS, FILTERED], ids=["chosen by the graph", "filtered"])
@pytest.mark.parametrize("path", ["forward", "decode loop", "verify", "captured verify"])
def test_every_path_scores_tokens_by_their_requests_mode(played, path, params):
    loop, model = by_paths(path, requests_of(params))
    for request in loop.requests:
        ids, of_request = request.prompt_token_ids + request.output_token_ids, request.params
        logits = model.logits(ids)[len(request.prompt_token_ids) - 1 :].float()
        assert len(request.output_logprobs) == len(request.output_token_ids) == 9
        for position, found in enumerate(request.output_logprobs):
            scores = scores_of(of_request, logits[position], of_request.logprobs_mode or RAW)
            reference = scores.log_softmax(-1)
            assert found.logprob == pytest.approx(float(reference[found.token_id]), abs=1e-4)
            if of_request.logprobs == -1:
                assert found.of_all == pytest.approx(reference.numpy(), abs=1e-4)
            kept = None
            if of_request.return_sampling_mask:
                draw = scores_of(of_request, logits[position], PROCESSED)
                kept = (draw > -torch.inf).nonzero().flatten().tolist()
                assert 0 < len(kept) < VOCAB
            assert (None if found.kept is None else found.kept.tolist()) == kept
