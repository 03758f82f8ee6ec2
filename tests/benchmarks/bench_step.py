"""The host's work of a step: scheduler, graph dispatch, attention metadata, sampler, and all of it on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.metadata import AttentionMetadataBuilder, CommonAttentionMetadata, KVCacheSpec
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler
from tests.runtime.attention.attention_cases import make_case, make_layer
from tests.runtime.runner_cases import Loop, make_runner
from tests.runtime.sampling.sampling_cases import make_state, random_logits

REQUESTS = 256


def decoding_scheduler() -> Scheduler:
    """256 requests with their prompts done."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_running_requests=REQUESTS,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            page_size=16,
            num_pages=REQUESTS * 4096 // 16 + 1,
        )
    )
    for index in range(REQUESTS):
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        scheduler.add(Request(request_id=str(index), prompt_token_ids=[index + 1] * 16, params=params))
    scheduler_step(scheduler)
    return scheduler


def scheduler_step(scheduler: Scheduler):
    batch = scheduler.schedule()
    scheduler.update(batch, np.full(batch.num_requests, 7, dtype=np.int64))
    return batch


def test_scheduler_step_of_256_requests(measure):
    scheduler = decoding_scheduler()
    batch = measure(lambda: scheduler_step(scheduler), rounds=150, iterations=16)  # 16 steps: one page boundary each
    assert batch.num_decodes == REQUESTS


def test_admission_of_256_requests(measure):
    scheduler = measure(decoding_scheduler, rounds=20)
    assert scheduler.stats().running == REQUESTS


def test_dispatch_of_a_batch(measure):
    dispatcher = GraphDispatcher({GraphKind.PIECEWISE: range(8, 513, 8), GraphKind.DECODE: range(8, 257, 8)})
    found = measure(lambda: next(dispatcher.candidates(200, is_decode=True)), rounds=100, iterations=500)
    assert found.kind is GraphKind.DECODE


@pytest.mark.parametrize("new_lens", [[1] * REQUESTS, [1] * (REQUESTS - 8) + [64] * 8], ids=["decode", "mixed"])
def test_attention_metadata_of_256_requests(measure, new_lens):
    layers = tuple(make_layer(layer_id=index) for index in range(36))
    batch = make_case(layers[0], [40] * REQUESTS, new_lens, page_size=16).batch
    builder = AttentionMetadataBuilder(KVCacheSpec(layers, 16))
    built = measure(lambda: builder.build(0, CommonAttentionMetadata.of(batch)), rounds=100, iterations=50)
    assert len(built) == len(layers)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_p=0.9)],
    ids=["greedy", "temperature", "top_p"],
)
def test_sampler_of_32_rows(measure, params):
    vocab = 32_000
    state = make_state(*[params] * 32, vocab_size=vocab)
    logits = random_logits(32, vocab_size=vocab)
    rows, positions = torch.arange(1, 33), torch.arange(32)
    output = measure(lambda: Sampler()(logits, state, rows, state.flags, positions), rounds=12, reference="rows")
    assert output.token_ids.shape == (32,)


def test_whole_step_of_64_requests_on_a_model_that_costs_nothing(measure):
    runner = make_runner(max_running_requests=64, max_num_batched_tokens=256, num_pages=64 * 17, max_model_len=64)
    loop = Loop(runner)
    for index in range(64):
        loop.add([index % 60] * 4, max_tokens=None, ignore_eos=True)

    def step():
        batch = loop.scheduler.schedule()
        return loop.scheduler.update(batch, loop.steps.submit(batch).wait().token_ids)

    step()
    result = measure(step, rounds=50)
    assert len(result.accepted) == 64
