"""Two thousand requests through the embedded model on a CPU; tests/gpu/test_soak.py has five thousand on a GPU."""

import pytest

from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.soak import run_soak
from tests.tiny_model import engine_of_pages, tiny_config

NUM_ON_RANKS = 2000
NUM_PAGES = 161  # 640 tokens, where 32 requests of 52 tokens on average want 1,664


@pytest.mark.parametrize("method", ["none", "suffix"])
@pytest.mark.parametrize("num_requests", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_requests_that_come_go_and_are_preempted_all_end_and_leave_nothing_behind(eager_cache, num_requests, method):
    runtime = {"max_running_requests": 32, "max_num_batched_tokens": 256, "max_model_len": 128, "page_size": 4}
    speculative = {"method": method}
    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime=runtime, speculative=speculative)
    with engine_of_pages(config, NUM_PAGES) as engine:
        result = run_soak(engine, num_requests, 3072, max_prompt=24, max_output=80, in_flight=64)
        drafts = engine.stats().drafts
    print(result, drafts)
    assert (drafts > 0) is (method != "none")
    assert result.preemptions > 0
    assert result.finished["abort"] > num_requests // 30
    assert result.host_mib < 32


@pytest.mark.parametrize("num_requests", [16, pytest.param(600, marks=pytest.mark.slow)])
def test_long_prompts_that_come_beside_answers_all_end_with_steps_bounded_by_time(eager_cache, num_requests):
    runtime = {"max_running_requests": 16, "max_num_batched_tokens": 512, "max_model_len": 768, "max_step_ms": 20}
    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime=runtime)
    with engine_of_pages(config, 200) as engine:
        result = run_soak(engine, num_requests, 3072, max_prompt=600, max_output=40, in_flight=24)
        stats = engine.stats()
    print(result, stats)
    assert stats.step_bound_ms == 20
    assert stats.time_between_tokens.count > 0


@pytest.mark.slow
@pytest.mark.parametrize("key", ["tensor_parallel_size", "expert_parallel_size"])
def test_requests_on_two_ranks_all_end_and_leave_nothing_behind(tmp_path, key):
    """Of a mixture, cut over the ranks or with experts spread over them, which then have requests of their own."""
    model = tmp_path / "model"
    save_tiny_model(config_of_architecture("qwen3_moe"), model)
    runtime = {"max_running_requests": 16, "max_num_batched_tokens": 128, "max_model_len": 128, "page_size": 4, key: 2}
    config = tiny_config(tmp_path / "cache", model={"path": str(model)}, compile={"backend": "eager"}, runtime=runtime)
    with engine_of_pages(config, NUM_PAGES // 2) as engine:
        result = run_soak(engine, NUM_ON_RANKS, 99, max_prompt=24, max_output=80, in_flight=48)
    print(result)
    assert result.preemptions > 0
    assert result.host_mib < 32
