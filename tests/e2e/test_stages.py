"""An engine of a pipeline's stages, processes over gloo: its tokens are one rank's, with all that it takes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ConfigError, EngineDeadError, RequestError, WeightUpdateError
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.program.stages import stage_program
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.runner import StepRunner
from mllm_compile.store.source import ArtifactSource
from tests.e2e.test_ranks import GREEDY, PROMPTS, followers, tokens
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.tiny_model import engine_of_pages, tiny_config
from tests.tiny_vision import image, media_prompt, save_vision_model, vision_engine_config


@pytest.fixture(scope="module")
def cache(eager_cache: Path) -> Path:
    load_or_compile(config_of(eager_cache))
    return eager_cache


def config_of(cache: Path, num_stages: int = 2, sections: Any = None, **runtime: Any) -> Any:
    settings = {"pipeline_parallel_size": num_stages, "max_num_batched_tokens": 32} | runtime
    return tiny_config(cache, compile={"backend": "eager"}, runtime=settings, **(sections or {}))


@pytest.fixture(scope="module")
def alone(cache: Path) -> Iterator[Engine]:
    with Engine(config_of(cache, num_stages=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def stages(cache: Path) -> Iterator[Engine]:
    with Engine(config_of(cache)) as engine:
        yield engine


def test_greedy_tokens_are_one_ranks_in_batches_with_prompts_in_chunks(stages, alone):
    assert tokens(stages) == tokens(alone)


def test_steps_of_other_requests_are_under_way_while_the_last_stage_computes_one(stages, alone, monkeypatch):
    """Rank 0 announces the next step ahead of computing one, so the first stage computes it meanwhile."""
    events: list[tuple[str, frozenset[int], int]] = []
    prepare, launch = StepRunner.prepare, StepRunner.launch

    def noted(what: str, batch: ScheduledBatch) -> None:
        events.append((what, frozenset(batch.rows.tolist()), batch.num_decodes))

    monkeypatch.setattr(StepRunner, "prepare", lambda self, batch: noted("told", batch) or prepare(self, batch))
    monkeypatch.setattr(
        StepRunner, "launch", lambda self, step: noted("computed", step.step.batch) or launch(self, step)
    )
    assert tokens(stages) == tokens(alone)
    told, ahead = dict[int, frozenset[int]](), 0
    for what, rows, num_decodes in events:
        if what == "told":
            told[len(told)] = rows
        elif num_decodes:
            ahead += any(not rows & other for other in list(told.values())[-1:])
    assert ahead > 10, "decodes of half of the requests are computed beside those of the other half"


def test_draws_penalties_grammars_and_scores_match_one_rank(stages, alone):
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=10, ignore_eos=True, repetition_penalty=1.2)
    form = StructuredOutputsParams(regex="[a-z ]{6}")
    formed = SamplingParams(temperature=0, max_tokens=9, structured_outputs=form)
    assert tokens(stages, params=[drawn, formed, GREEDY, drawn]) == tokens(alone, params=[drawn, formed, GREEDY, drawn])
    scored = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    ours, theirs = (engine.generate(PROMPTS[1:3], scored) for engine in (stages, alone))
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        for mine, yours in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert {token: entry.logprob for token, entry in mine.items()} == pytest.approx(
                {token: entry.logprob for token, entry in yours.items()}, abs=1e-4
            )


def test_a_prefix_hit_and_an_aborted_request_change_nothing(stages, alone):
    _, hit = (stages.generate(PROMPTS[2], GREEDY)[0] for _ in range(2))
    assert hit.num_cached_tokens > 0
    assert hit.token_ids == alone.generate(PROMPTS[2], GREEDY)[0].token_ids
    stream = stages.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    assert tokens(stages) == tokens(alone)


def test_each_rank_has_its_stages_layers_and_weights_alone(stages, cache):
    compiled = load_or_compile(config_of(cache))
    program, weights = compiled.artifact.program, compiled.artifact.weights
    assert [[value.shape for value in stage.takes] for stage in program.stages] == [[(1, -1, 192)]]
    parts = [stage_program(program, stage).program for stage in range(2)]
    assert [layer.name for part in parts for layer in part.layers] == [layer.name for layer in program.layers]
    assert [layer.layer_id for part in parts for layer in part.layers] == [0, 1, 0, 1]
    tied = {spec.name for spec in weights if all(spec.name in part.weights for part in parts)}
    assert tied == {"model.embed_tokens.weight"}
    held = [ArtifactSource(compiled, Timeline(), rank).weight_bytes for rank in range(2)]
    (twice,) = (spec.num_bytes for spec in weights if spec.name in tied)
    assert sum(held) == sum(spec.num_bytes for spec in weights) + twice
    assert stages.is_alive


MODELS = [
    *((name, {}) for name in ("qwen3_next", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt_oss", "bamba", "gpt2")),
    *((name, {"tensor_parallel_size": 2}) for name in ("qwen3_moe", "qwen3_next")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), MODELS)
def test_states_experts_and_latents_give_one_ranks_tokens(name, settings, tmp_path):
    save_tiny_model(config_of_architecture(name), tmp_path / "model")
    found = []
    for num_stages in (1, 2):
        runtime = {"max_model_len": 128, "max_num_batched_tokens": 32, "pipeline_parallel_size": num_stages}
        model = {"path": str(tmp_path / "model")}
        runtime |= settings if num_stages > 1 else {}
        config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=runtime)
        prompts = [[41, 30, 77, 5, 12], [7, 7, 81], list(range(20, 60))]
        with Engine(config) as engine:
            found.append([tokens(engine, prompts), tokens(engine, prompts)])  # with states of prefixes
    assert found[0] == found[1]


# What a pipeline has been tried with, and works with.
MEETS: list[tuple[int, dict[str, Any]]] = [
    (2, {"speculative": {"method": "suffix"}}),
    (3, {}),
    (2, {"runtime": {"tensor_parallel_size": 2}}),
    (2, {"model": {"quantization": "int4"}}),
    (2, {"runtime": {"deterministic": True}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "sections"), [*MEETS, (2, {"compile": {"backend": "inductor"}})])
def test_what_meets_stages_gives_one_ranks_tokens(num_stages, sections, eager_cache):
    found = []
    for runtime in ({}, {"pipeline_parallel_size": num_stages} | sections.get("runtime", {})):
        runtime |= {name: value for name, value in sections.get("runtime", {}).items() if name == "deterministic"}
        given = {"compile": {"backend": "eager"}} | sections
        given["runtime"] = {"max_num_batched_tokens": 32} | runtime
        with Engine(tiny_config(eager_cache, **given)) as engine:
            found.append([tokens(engine), tokens(engine)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_engine_of_stages_sleeps_and_wakes(cache, alone):
    with Engine(config_of(cache, enable_sleep_mode=True)) as engine:
        assert tokens(engine) == tokens(alone)
        engine.sleep(level=1)
        engine.wake_up()
        assert tokens(engine) == tokens(alone)
        with pytest.raises(WeightUpdateError, match="weights of stages cannot be updated"):
            engine.update_weights([])


@pytest.mark.slow
def test_preempted_requests_give_the_same_and_a_closed_engine_leaves_no_process(cache, alone):
    before = set(followers())
    engine = engine_of_pages(config_of(cache, max_model_len=128, enable_prefix_cache=False), num_pages=9)
    try:
        many = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        assert tokens(engine, PROMPTS[:2] * 2, many) == tokens(alone, PROMPTS[:2] * 2, many)
        assert engine.stats().preemptions > 0
        assert set(followers()) - before
    finally:
        engine.close()
    assert set(followers()) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_is_killed_or_hangs_ends_every_request_with_its_reason(cache, how):
    before = set(followers())
    engine = Engine(config_of(cache))
    try:
        (follower,) = set(followers()) - before
        os.kill(follower, signal.SIGSTOP)  # so no request can end before it
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        os.kill(follower, how)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) (was ended by signal 9|.* it hangs)"):
                for _ in stream:
                    pass
    finally:
        engine.close()
    assert set(followers()) == before


# What a pipeline does without, and how it says so; docs/lab/ranks.md has the table.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts over ranks": ({"runtime": {"expert_parallel_size": 2}}, "ranks with requests of their own"),
    "halves": (
        {"runtime": {"tensor_parallel_size": 2, "enable_dbo": True, "dbo_prefill_token_threshold": 16}},
        "enable_dbo is set",
    ),
    "counts of experts": ({"runtime": {"expert_stats": True}}, "expert_stats is set"),
    "routes of experts": ({"runtime": {"routed_experts": True}}, "routed_experts is set"),
    "tiers": ({"runtime": {"kv_offloading_size": 0.1}}, "kv_offloading_size is 0.1, which runtime.pipeline"),
    "adapters": ({"lora": {"max_adapters": 1}}, "stages take no adapters"),
    "the eager model": ({"runtime": {"skip_compiled": True}}, "skip_compiled"),
    "more stages than layers": ({"runtime": {"pipeline_parallel_size": 8}}, "cannot be cut as often"),
    "cascades": ({"runtime": {"cascade_attention": True}}, "is not captured whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_do_not_take_is_refused_by_name(name, cache):
    sections, why = REFUSED[name]
    runtime = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 32} | sections.get("runtime", {})
    others = {key: value for key, value in sections.items() if key != "runtime"}
    with pytest.raises(ConfigError, match=why):
        load_or_compile(tiny_config(cache, compile={"backend": "eager"}, runtime=runtime, **others))


@pytest.mark.slow
def test_a_model_with_images_serves_its_text_and_refuses_images_by_name(tmp_path):
    save_vision_model("qwen2_vl", tmp_path / "model")
    found = []
    for num_stages in (1, 2):
        config = vision_engine_config(tmp_path / "model", tmp_path / "cache", pipeline_parallel_size=num_stages)
        with Engine(config) as engine:
            found.append(tokens(engine, [[3, 4, 5, 6, 7], [8, 9]]))
            if num_stages == 2:
                with pytest.raises(RequestError, match=r"runtime\.pipeline_parallel_size is set"):
                    engine.generate(media_prompt([3, 4], image(1, (1, 4, 6)), [5]), GREEDY)
    assert found[0] == found[1]
