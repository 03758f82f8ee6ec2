"""The sampler on CUDA: FlashInfer's kernels against the plain path, the same tokens as on CPU, graphs, no sync."""

import math

import pytest
import torch
from torch import nn

from mllm_compile.runtime.sampling import logit_filters
from mllm_compile.runtime.sampling.logit_filters import filter_scores
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.sampling.state import SamplingFlags, SamplingState
from tests.runtime.sampling.sampling_cases import PROMPT, assert_drawn_from, draws, make_state, random_logits, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

VOCAB = 151_936
GREEDY = SamplingParams(temperature=0)
KINDS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(top_p=0.8, min_p=0.001),
    SamplingParams(top_k=50, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(logit_bias={5: 3.0, VOCAB - 1: 3.0}, min_tokens=8, logprobs=4),
]


def cuda_logits(num_rows, **kwargs):
    return random_logits(num_rows, vocab_size=VOCAB, **kwargs).cuda()


@pytest.fixture
def plain_path(monkeypatch):
    """Calls a function with FlashInfer's kernels out of the way."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(logit_filters, "_flashinfer_sampling", lambda: None)
            return function(*args)

    return call


def test_flashinfer_is_there_so_that_its_path_is_what_is_tested():
    assert logit_filters._flashinfer_sampling() is not None


@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_flashinfers_kernels_keep_the_tokens_that_a_sort_keeps(plain_path, spread):
    scores = nn.functional.pad(cuda_logits(64, spread=spread), (0, 128), value=-math.inf)
    top_ks = torch.tensor([0, 1, 20, 1000], device="cuda").repeat(16)
    top_ps = torch.tensor([1.0, 0.1, 0.9, 0.999], device="cuda").repeat_interleave(16)
    for ks, ps in ((top_ks, None), (None, top_ps), (top_ks, top_ps)):
        kept = filter_scores(scores.clone(), ks, ps, None).isfinite()
        expected = plain_path(filter_scores, scores.clone(), ks, ps, None).isfinite()
        # Sums of 152k float32 probabilities differ in their last digits: a token at the edge may fall on either side.
        edge = 0 if ps is None else 0.002 * expected.sum(-1) + 1
        assert ((kept != expected).sum(-1) <= edge).all()
        assert (kept.sum(-1) > 0).all()


def test_parameters_may_be_columns_of_a_table():
    scores = nn.functional.pad(cuda_logits(8), (0, 128), value=-math.inf)
    table = torch.rand(8, 6, device="cuda") * 0.8 + 0.1
    dense = filter_scores(scores.clone(), None, table[:, 2].contiguous(), None)
    assert torch.equal(filter_scores(scores.clone(), None, table[:, 2], None), dense)


def test_a_row_without_filters_keeps_its_very_scores_among_rows_with_them():
    scores = nn.functional.pad(cuda_logits(2, spread=20), (0, 128), value=-math.inf)
    top_ks, top_ps = torch.tensor([0, 5], device="cuda"), torch.tensor([1.0, 0.5], device="cuda")
    assert torch.equal(filter_scores(scores.clone(), top_ks, top_ps, None)[0], scores[0])


def test_the_cuda_argmax_takes_the_first_of_equal_logits():
    logits = cuda_logits(256).bfloat16()
    logits[:, [150_000, 40_000, 77]] = 60.0
    state = make_state(*[GREEDY] * 256, device="cuda", vocab_size=VOCAB)
    assert sample(state, logits, list(range(1, 257)), [5] * 256).token_ids.tolist() == [77] * 256


@pytest.mark.parametrize("params", KINDS)
def test_tokens_match_the_cpu(params):
    logits = random_logits(1, vocab_size=2000)[0]
    on_cpu, on_gpu = (
        draws(params_within(params, 2000), logits, 4000),
        draws(params_within(params, 2000), logits.cuda(), 4000),
    )
    # Rounding of log and exp differs between the devices; it decides only what is nearly a tie.
    assert (on_cpu == on_gpu.cpu()).float().mean() > 0.999


def params_within(params, vocab_size):
    """The same parameters with a bias that fits a small vocabulary."""
    return params if params.logit_bias is None else SamplingParams(logit_bias={5: 3.0, vocab_size - 1: 3.0})


def test_draws_over_all_filters_follow_the_distribution():
    logits = random_logits(1)[0].cuda()
    kept = filter_scores(
        logits[None].clone(), torch.tensor([40]).cuda(), torch.tensor([0.9]).cuda(), torch.tensor([-3.0]).cuda()
    )
    tokens = draws(SamplingParams(top_k=40, top_p=0.9, min_p=math.exp(-3.0)), logits, 50_000)
    assert_drawn_from(tokens, kept.softmax(-1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_same_alone_and_in_a_crowd_of_any_size(dtype):
    logits = cuda_logits(250).to(dtype)
    params = [KINDS[i % len(KINDS)] for i in range(250)]
    crowd = sample(
        make_state(*params, device="cuda", vocab_size=VOCAB), logits, list(range(1, 251)), list(range(9, 259))
    ).token_ids.tolist()
    for size in (1, 3, 40):
        for start in range(0, 250 - size, 83):
            part = range(start, start + size)
            state = SamplingState(252, VOCAB, "cuda")
            for i in part:
                state.set_request(i + 1, params[i], PROMPT, 1000 + i)
            tokens = sample(
                state, logits[part.start : part.stop], [i + 1 for i in part], [i + 9 for i in part]
            ).token_ids
            assert tokens.tolist() == crowd[part.start : part.stop]


def test_nothing_waits_for_the_device():
    state = make_state(*KINDS, device="cuda", vocab_size=VOCAB, stop_ids=(3,))
    logits = cuda_logits(len(KINDS))
    rows = torch.arange(1, len(KINDS) + 1, device="cuda")
    positions = torch.full_like(rows, 5)
    Sampler()(logits, state, rows, state.flags, positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.clear(5)
        state.set_request(5, KINDS[4], PROMPT, 9, output_token_ids=[4, 4])
        state.set_request(6, KINDS[5], PROMPT, 9, stop_ids=(3,))
        Sampler()(logits, state, rows, state.flags, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("flags", [SamplingFlags(), SamplingFlags(all_greedy=False)])
def test_greedy_and_temperature_steps_can_be_captured_and_follow_new_requests(flags):
    logits, rows = cuda_logits(4), torch.tensor([1, 2, 3, 0], device="cuda")
    positions = torch.full_like(rows, 5)
    state = make_state(GREEDY, SamplingParams(seed=4), GREEDY, device="cuda", vocab_size=VOCAB)
    state.flush()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        Sampler()(logits, state, rows, flags, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = Sampler()(logits, state, rows, flags, positions)
    for step in range(4):
        logits.copy_(cuda_logits(4, seed=step))
        positions.fill_(6 + step)
        if step == 2:
            state.set_request(2, SamplingParams(temperature=0.7), PROMPT, 77)
        state.flush()
        graph.replay()
        assert torch.equal(output.token_ids, Sampler()(logits, state, rows, flags, positions).token_ids)


def test_changes_pending_at_a_capture_are_an_error_not_a_stale_graph():
    state = make_state(SamplingParams(), device="cuda")
    logits, rows = random_logits(1).cuda(), torch.ones(1, dtype=torch.int64, device="cuda")
    with pytest.raises(RuntimeError, match="flush"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        Sampler()(logits, state, rows, state.flags, rows)
