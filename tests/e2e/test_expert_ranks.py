"""An engine of two ranks over gloo that share a mixture's experts: tokens are one rank's, whatever each one does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ConfigError, EngineDeadError
from mllm_compile.runtime.forward_batch import ForwardMode
from mllm_compile.runtime.model_runner import ModelRunner
from tests.e2e.test_ranks import followers, tokens
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.quantised_experts import write_experts
from tests.tiny_model import engine_of_pages, tiny_config

PROMPTS = [[41, 30, 77, 5, 12], [7, 7, 81], list(range(20, 60)), [3]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("mixture")
    save_tiny_model(config_of_architecture("qwen3_moe"), folder / "model")
    return folder


def config_of(folder: Path, num_ranks: int = 2, **runtime: Any) -> Any:
    settings = {"expert_parallel_size": num_ranks, "max_model_len": 128, "max_num_batched_tokens": 32} | runtime
    model = {"path": str(folder / "model")}
    return tiny_config(folder / "cache", model=model, compile={"backend": "eager"}, runtime=settings)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Engine]:
    with Engine(config_of(folder, 1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Engine]:
    with Engine(config_of(folder)) as engine:
        yield engine


def test_greedy_tokens_are_one_ranks_in_batches_with_prompts_in_chunks(ranks, alone):
    assert tokens(ranks, PROMPTS, GREEDY) == tokens(alone, PROMPTS, GREEDY)


def test_a_rank_without_requests_takes_part_in_idle_steps(ranks, alone, monkeypatch):
    modes, forward = [], ModelRunner.forward

    def noting(runner, batch):
        modes.append(batch.forward_mode)
        return forward(runner, batch)

    params = [replace(GREEDY, max_tokens=2), GREEDY]  # this rank's request ends first
    expected = tokens(alone, PROMPTS[1:3], params)
    monkeypatch.setattr(ModelRunner, "forward", noting)
    assert tokens(ranks, PROMPTS[1:3], params) == expected
    assert ForwardMode.IDLE in modes


def test_a_prefix_hit_gives_the_same_on_the_rank_that_has_it(ranks, alone):
    outputs = [ranks.generate(PROMPTS[2], GREEDY)[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens > 0
    assert {tuple(output.token_ids) for output in outputs} == {tuple(tokens(alone, PROMPTS[2:3], GREEDY)[0])}


def test_draws_penalties_and_scores_match_one_rank(ranks, alone):
    how = {"max_tokens": 10, "ignore_eos": True, "detokenize": False}
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=7, repetition_penalty=1.2, logprobs=2, **how)
    ours, theirs = (engine.generate(PROMPTS, drawn) for engine in (ranks, alone))
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        scores = [[entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True)]
                  for output in (one, other)]  # fmt: skip
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_scores_of_prompts_in_chunks_match_one_rank(ranks, alone):
    scored = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, prompt_logprobs=count)
              for count in (2, 0, 1, None)]  # fmt: skip
    ours, theirs = (engine.generate(PROMPTS, scored) for engine in (ranks, alone))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert ours[3].prompt_logprobs is None
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert len(one.prompt_logprobs) == len(one.prompt_token_ids)
        for mine, yours in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert {token: entry.logprob for token, entry in mine.items()} == pytest.approx(
                {token: entry.logprob for token, entry in yours.items()}, abs=1e-4
            )


def test_several_completions_of_a_prompt_and_an_abort_leave_the_engine_right(ranks, alone):
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True, detokenize=False)
    ours, theirs = (engine.generate(PROMPTS[2], several)[0] for engine in (ranks, alone))
    assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    stream = ranks.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False))
    next(stream)
    stream.close()
    assert tokens(ranks, PROMPTS, GREEDY) == tokens(alone, PROMPTS, GREEDY)


@pytest.mark.slow
def test_preempted_requests_give_the_same_and_a_closed_engine_leaves_no_process(folder, alone):
    before = set(followers())
    engine = engine_of_pages(config_of(folder, enable_prefix_cache=False), num_pages=9)
    try:
        many = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
        assert tokens(engine, PROMPTS * 2, many) == tokens(alone, PROMPTS * 2, many)
        assert engine.stats().preemptions > 0
    finally:
        engine.close()
    assert set(followers()) == before


@pytest.mark.slow
def test_a_killed_rank_ends_every_request_with_its_reason(folder):
    before = set(followers())
    engine = Engine(config_of(folder))
    try:
        (follower,) = set(followers()) - before
        os.kill(follower, signal.SIGSTOP)  # so no request can end before it
        endless = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        os.kill(follower, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was ended by signal 9"):
                for _ in stream:
                    pass
    finally:
        engine.close()
    assert set(followers()) == before


def test_unserved_settings_are_refused(folder, ranks):
    with pytest.raises(ConfigError, match="expert_parallel_size is 3, and this model has no experts that can be dealt"):
        load_or_compile(config_of(folder, 3))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2 and runtime\.expert_parallel_size 2"):
        load_or_compile(config_of(folder, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"expert_parallel_size is 2 and runtime\.deterministic is set"):
        load_or_compile(config_of(folder, deterministic=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_experts_in_few_bits_stay_so_and_give_one_ranks_tokens(name, folder, tmp_path):
    model = {"path": str(folder / "model"), "quantization": name}
    if name == "mxfp4":
        write_experts(name, tmp_path, {})
        model = {"path": str(tmp_path / "packed")}
    found = []
    for num_ranks in (1, 2):
        runtime = {"max_model_len": 64, "expert_parallel_size": num_ranks}
        config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=runtime)
        with Engine(config) as engine:
            found.append(tokens(engine, PROMPTS, GREEDY))
    assert found[0] == found[1]
    weights = {spec.name: spec for spec in load_or_compile(config).artifact.weights_of(1)}
    (up,) = (spec for name, spec in weights.items() if name.endswith("layers.0.mlp.experts.gate_up_proj"))
    assert up.dtype.itemsize == 1
    assert up.shape[0] == weights[f"{up.name}_scales"].shape[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid"])
def test_layers_with_a_state_give_one_ranks_tokens_with_states_of_prefixes(name, tmp_path):
    save_tiny_model(config_of_architecture(name), tmp_path / "model")
    prompts = [*PROMPTS, list(range(20, 55))]
    found, hits = [], []
    for num_ranks in (1, 2):
        with Engine(config_of(tmp_path, num_ranks)) as engine:
            found.append([tokens(engine, prompts, GREEDY) for _ in range(3)])
            hits.append(engine.stats().prefix_hit_tokens)
    assert found[0] == found[1]
    assert min(hits) > 0


def test_a_cached_runtime_says_for_how_many_ranks_it_is(ranks, folder):
    factors = load_or_compile(config_of(folder)).artifact.factors
    assert factors["expert parallel"] == "2 ranks"
    assert "tensor parallel" not in factors
