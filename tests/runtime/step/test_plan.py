import numpy as np
import pytest

from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.plan import plan_fixed_rows, plan_rows, plan_step
from tests.runtime.runner_cases import Loop, TinyModel, make_runner

PAGE_SIZE = 4
PADDING = [0] * (LEAST_ROWS - 8)


@pytest.fixture
def mixed_batch():
    """A decode at position 3, a whole prompt of 5 that is scored, and the first 2 tokens of one of 7."""
    limits = {"max_running_requests": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    scheduler = Scheduler(SchedulerConfig(**limits, page_size=PAGE_SIZE, num_pages=50, enable_prefix_cache=False))

    def add(prompt, **params):
        params = SamplingParams(temperature=0, max_tokens=9, **params)
        scheduler.add(Request(request_id=str(prompt), prompt_token_ids=prompt, params=params))

    add([7, 8, 9])
    first = scheduler.schedule()
    scheduler.update(first, np.array([40]))
    add([11, 12, 13, 14, 15], prompt_logprobs=2)
    add([21, 22, 23, 24, 25, 26, 27])
    batch = scheduler.schedule()
    assert batch.num_new.tolist() == [1, 5, 2]
    return batch


@pytest.fixture
def pages(mixed_batch):
    """Row r has the pages 10 r, 10 r + 1, …"""
    table = HostPageTable(5, 64, PAGE_SIZE)
    for row in range(1, 5):
        table.write(np.full(16, row), np.arange(16), 10 * row + np.arange(16))
    return table


def test_a_mixed_step_samples_the_last_tokens_and_scores_the_prompt_s(mixed_batch, pages):
    plan = plan_step(mixed_batch, pages)
    assert not plan.is_decode
    assert plan.fields.input_ids.tolist() == [0, 11, 12, 13, 14, 15, 21, 22]
    assert plan.fields.positions.tolist() == [3, 0, 1, 2, 3, 4, 0, 1]
    assert plan.fields.logits_indices.tolist() == [0, 5]
    assert plan.fields.sampled_positions.tolist() == [4, 5]
    assert plan.sampled.tolist() == [0, 1]
    assert plan.fields.scored_indices.tolist() == [1, 2, 3, 4]
    assert plan.fields.prompt_targets.tolist() == [12, 13, 14, 15]
    assert plan.prompt_rows.tolist() == [1] * 4 and plan.prompt_num_top == 2


def test_fixed_rows_are_a_decode_of_one_token_each_and_padding(mixed_batch, pages):
    a, b, c = mixed_batch.rows.tolist()
    plan = plan_fixed_rows(mixed_batch, pages, num_rows=10)
    assert plan.is_decode
    assert plan.fields.req_pool_indices.tolist() == [a, b, b, b, b, b, c, c, 0, 0]
    assert plan.fields.input_ids.tolist() == [0, 11, 12, 13, 14, 15, 21, 22, 0, 0]
    assert plan.fields.positions.tolist() == [3, 0, 1, 2, 3, 4, 0, 1, 0, 0]
    assert plan.fields.seq_lens.tolist() == [4, 1, 2, 3, 4, 5, 1, 2, 1, 1]
    first, second, third = (10 * row * PAGE_SIZE for row in (a, b, c))
    slots = [first + 3, *range(second, second + 5), third, third + 1]
    assert plan.fields.out_cache_loc.tolist() == [*slots, 0, 0]
    assert plan.fields.sampled_rows.tolist() == [a, 0, 0, 0, 0, b, 0, 0, 0, 0]
    assert plan.sampled.tolist() == [0, 1] and plan.token_indices.tolist() == [0, 5]
    assert plan.fields.prompt_targets.tolist() == [0, 12, 13, 14, 15, 0, 0, 0, 0, 0]
    assert plan.score_indices.tolist() == [1, 2, 3, 4]


def test_any_rows_are_a_decode_of_one_token_each_and_padded_where_they_are_few(mixed_batch, pages):
    a, b, c = mixed_batch.rows.tolist()
    plan, fixed = plan_rows(mixed_batch, pages), plan_fixed_rows(mixed_batch, pages, num_rows=LEAST_ROWS)
    assert plan.is_decode
    assert plan.fields.req_pool_indices.tolist() == [a, b, b, b, b, b, c, c, *PADDING]
    for name in ("input_ids", "positions", "seq_lens", "out_cache_loc"):
        assert getattr(plan.fields, name).tolist() == getattr(fixed.fields, name).tolist()
    of_samples = [0] * (LEAST_ROWS - 2)
    assert plan.fields.logits_indices.tolist() == [0, 5, *of_samples]
    assert plan.fields.sampled_rows.tolist() == [a, b, *of_samples]
    assert plan.fields.sampled_positions.tolist() == [4, 5, *of_samples]
    assert plan.sampled.tolist() == [0, 1] and plan.token_indices.tolist() == [0, 1]
    assert plan.fields.scored_indices.tolist()[:5] == [1, 2, 3, 4, 0] and plan.fields.scored_indices.size == LEAST_ROWS
    assert plan.fields.prompt_targets.tolist()[:5] == [12, 13, 14, 15, 0]
    assert plan.score_indices.tolist() == [0, 1, 2, 3]


def test_steps_of_any_rows_give_the_model_s_tokens():
    model = TinyModel()
    runner = make_runner(model, deterministic=True, any_rows=True, max_num_batched_tokens=90, max_running_requests=5)
    loop = Loop(runner)
    prompts = [[3, 9, 27, 20, 60], [1, 2], [7] * 50, [9, 8] * 22, [5, 4, 3, 2, 1, 0, 59, 58, 57, 33, 12]]
    requests = [loop.add(prompt, logprobs=2, prompt_logprobs=2) for prompt in prompts]
    loop.run()
    assert [request.output_token_ids for request in requests] == [model.greedy(prompt, 8) for prompt in prompts]
    assert len({tokens for tokens, _ in model.calls}) > 1  # steps have as many rows as they need
    assert min(map(min, model.calls)) >= LEAST_ROWS
    for request, prompt in zip(requests, prompts, strict=True):
        expected = model.logits([*prompt, *request.output_token_ids]).log_softmax(-1)
        scored = [*request.prompt_logprobs, *request.output_logprobs]
        assert [score.token_id for score in scored] == [*prompt[1:], *request.output_token_ids]
        for row, score in enumerate(scored):
            assert score.logprob == pytest.approx(expected[row, score.token_id].item(), abs=1e-4)


def test_deterministic_steps_all_have_one_shape_and_give_the_model_s_tokens():
    model = TinyModel()
    loop = Loop(make_runner(model, deterministic=True, max_num_batched_tokens=16))
    prompts = [[3, 9, 27, 20, 60], [1, 2], [7] * 21, [5, 4, 3, 2, 1, 0, 59, 58, 57, 33, 12]]
    model.calls.clear()
    requests = [loop.add(prompt, logprobs=2, prompt_logprobs=2) for prompt in prompts]
    loop.run()
    assert [request.output_token_ids for request in requests] == [model.greedy(prompt, 8) for prompt in prompts]
    assert set(model.calls) == {(16, 16)}
    for request, prompt in zip(requests, prompts, strict=True):
        expected = model.logits([*prompt, *request.output_token_ids]).log_softmax(-1)
        scored = [*request.prompt_logprobs, *request.output_logprobs]
        assert [score.token_id for score in scored] == [*prompt[1:], *request.output_token_ids]
        for row, score in enumerate(scored):
            assert score.logprob == pytest.approx(expected[row, score.token_id].item(), abs=1e-4)
