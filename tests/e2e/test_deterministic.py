"""`runtime.deterministic` on a CPU: a request's numbers are bitwise its own, whatever runs beside it.

tests/gpu/test_deterministic.py has the same for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from tests.tiny_model import engine_of_pages, tiny_config

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=5)
PROMPT = "If the file cannot be opened, an OSError is raised.\n" * 4
CROWD = ["A", "The for statement is used to iterate over", "Return a new list containing " * 9, "x = 1\n" * 31]

EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="module")
def make_engine(eager_cache: Path) -> Iterator[EngineMaker]:
    made = []

    def make(num_pages: int | None = None, **runtime: Any) -> Engine:
        settings = {"deterministic": True, "enable_prefix_cache": False} | runtime
        config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime=settings)
        made.append(engine_of_pages(config, num_pages))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engine(make_engine: EngineMaker) -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> RequestOutput:
    return engine.generate(PROMPT, PARAMS)[0]


def numbers(output: RequestOutput) -> tuple[Any, ...]:
    """Every log-probability to its last bit."""
    return output.token_ids, output.logprobs, output.prompt_logprobs


def test_in_a_crowd_every_log_probability_is_bitwise_the_same(engine, alone):
    noise = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=9, seed=3)
    outputs = engine.generate([*CROWD, PROMPT, *CROWD], [noise] * 4 + [PARAMS] + [noise] * 4)
    assert numbers(outputs[4]) == numbers(alone)


def test_a_prompt_cut_where_the_others_leave_room_gives_the_same(make_engine, alone):
    # Three decodes take three of the budget of 32: the prompt's chunks are of 29 tokens and not of 32.
    engine = make_engine(max_running_requests=4)
    busy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    streams = [engine.stream(text, busy) for text in CROWD[:3]]
    for stream in streams:
        next(stream)
    try:
        assert numbers(engine.generate(PROMPT, PARAMS)[0]) == numbers(alone)
    finally:
        for stream in streams:
            stream.close()


def test_a_prefix_hit_gives_the_same(make_engine, alone):
    engine = make_engine(enable_prefix_cache=True)
    without_prompt = replace(PARAMS, prompt_logprobs=None)
    cold, warm = (engine.generate(PROMPT, without_prompt)[0] for _ in range(2))
    assert warm.num_cached_tokens > 32 > cold.num_cached_tokens
    assert cold.logprobs == warm.logprobs == alone.logprobs


def test_preempted_requests_give_the_same(make_engine, alone):
    # Seven prompts of 10 tokens grow beyond their first page while the long one, the youngest, runs.
    prompt = alone.prompt_token_ids
    engine = make_engine(num_pages=1 + 7 + 3 + len(prompt) // 16, max_model_len=96)
    short = [list(range(100 * i, 100 * i + 10)) for i in range(1, 8)]
    grow = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = engine.generate([*short, prompt], [grow] * 7 + [PARAMS])
    assert engine.stats().preemptions > 0
    # Scores of a preempted prompt are its second run's.
    assert numbers(outputs[7]) == numbers(alone)


def test_a_seeded_sample_is_the_same_in_a_crowd(engine):
    seeded = SamplingParams(temperature=1.2, top_p=0.95, seed=5, max_tokens=12, logprobs=3, repetition_penalty=1.2)
    (single,) = engine.generate(PROMPT, seeded)
    crowded = engine.generate([*CROWD, PROMPT], [PARAMS] * 4 + [seeded])[-1]
    assert (crowded.token_ids, crowded.logprobs) == (single.token_ids, single.logprobs)


def test_without_it_a_crowd_changes_last_bits(make_engine):
    # Or the tests above show nothing.
    engine = make_engine(deterministic=False)
    (single,) = engine.generate(PROMPT, PARAMS)
    crowded = engine.generate([*CROWD, PROMPT], PARAMS)[-1]
    assert crowded.token_ids == single.token_ids
    assert crowded.logprobs != single.logprobs


def test_experts_multiply_each_row_by_itself(tmp_path):
    """Products of several rows have other last bits than one row's, and the crowd decides how many rows go to an
    expert."""
    from tests.model import tiny_configs

    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    tiny_configs.save_tiny_model(tiny_configs.tiny_config("qwen3_moe", **sizes), tmp_path / "model")
    sections = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64, "deterministic": True, "enable_prefix_cache": False},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    prompts = [[(7 * i + 3 * n) % 60 + 1 for n in range(5 + i)] for i in range(9)]
    with Engine(EngineConfig.from_dict(sections)) as engine:
        alone = engine.generate(prompts[4], PARAMS)[0]
        assert numbers(engine.generate(prompts, PARAMS)[4]) == numbers(alone)
