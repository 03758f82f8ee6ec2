"""A model cut over two GPUs against one, in every graph mode; and what becomes of an engine that loses one.

Run by themselves: python -m pytest tests/gpu/test_two_gpus.py. They skip themselves with fewer GPUs.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import EngineDeadError
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from mllm_compile.runtime.ubatch.overlap import BatchOverlap
from tests.e2e.test_ranks import followers
from tests.gpu.small_shape import ONE_RUNTIME, SHAPE
from tests.soak import run_soak
from tests.tiny_model import TINY, engine_of_pages
from tests.tiny_vision import image, media_prompt, save_vision_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs"),
]

MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
# A log-probability in bfloat16, of sums in another order; tokens may differ where two are as probable.
LARGEST_DIFFERENCE = 0.15
PROMPTS = [list(range(3, 3 + count)) for count in (1, 5, 30, 200, 7, 64, 17)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)


def config_of(
    cache: Path, num_ranks: int, mode: str, model: dict[str, Any], backend: str, **runtime: Any
) -> EngineConfig:
    return EngineConfig.from_dict(
        {
            "model": {"dtype": "bfloat16"} | model,
            "compile": {"backend": backend},
            "runtime": {
                "device": "cuda",
                "tensor_parallel_size": num_ranks,
                "max_model_len": 1024,
                "max_running_requests": 16,
                "max_num_batched_tokens": 128,
                **ONE_RUNTIME,
                **runtime,
            },
            "cudagraph": {"mode": mode},
            "cache": {"dir": str(cache)},
        }
    )


@contextmanager
def engine_of(*args: Any, **runtime: Any) -> Iterator[Engine]:
    engine = Engine(config_of(*args, **runtime))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_gpus")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A shape whose heads and widths divide by two and suit the kernels, of random weights."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_attention_heads": 16, "num_key_value_heads": 8}))
    return {"path": str(folder), "load_format": "dummy"}


def answers(
    engine: Engine, prompts: list[list[int]] = PROMPTS, params: SamplingParams | list[SamplingParams] = GREEDY
) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, of each prompt."""
    found = engine.generate(prompts, params)
    assert all(output.error is None for output in found)
    return [
        (
            output.token_ids,
            [entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True)],
        )
        for output in found
    ]


def assert_alike(ours: Any, theirs: Any) -> None:
    """Equal up to the first token where two were as probable; most answers are equal to their end."""
    num_equal = 0
    for (tokens, scores), (other_tokens, other_scores) in zip(ours, theirs, strict=True):
        same = next(
            (i for i, pair in enumerate(zip(tokens, other_tokens, strict=False)) if pair[0] != pair[1]), len(tokens)
        )
        num_equal += same == len(tokens)
        for one, other in zip(scores[: same + 1], other_scores[: same + 1], strict=True):
            assert abs(one - other) < LARGEST_DIFFERENCE
    assert num_equal >= len(ours) // 2


@pytest.fixture(scope="module")
def alone(cache: Path, small: dict[str, Any]) -> Any:
    with engine_of(cache, 1, "none", small, "inductor") as engine:
        return answers(engine)


@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_answer_as_one_in_every_graph_mode(cache, small, alone, mode):
    with engine_of(cache, 2, mode, small, "inductor") as engine:
        assert_alike(answers(engine), alone)
        assert_alike(answers(engine), alone)  # with hits of the prefix cache


def test_tokens_that_ranks_choose_together_match_gathered_logits(cache, small):
    kinds = (
        GREEDY,
        replace(GREEDY, logprobs=None),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, detokenize=False),
    )
    with engine_of(cache, 2, "full_and_piecewise", small, "inductor", enable_prefix_cache=False) as engine:
        # One by one, so that each time the steps are the same; kinds of steps take turns.
        found = [[engine.generate(prompt, kind)[0].token_ids for kind in kinds * 2] for prompt in PROMPTS]
        for scored, alone, drawn, *again in found:
            assert scored == alone
            assert again == [scored, alone, drawn]
        assert any(drawn != alone for _, alone, drawn, *_ in found)
        together = engine.generate(PROMPTS, [kinds[index % 3] for index in range(len(PROMPTS))])
        assert all(len(output.token_ids) == 24 and output.error is None for output in together)


@pytest.mark.parametrize("threshold", [32, 100])
def test_steps_in_halves_answer_as_one_gpu(cache, small, alone, threshold, monkeypatch):
    cuts, bodies = [], BatchOverlap.bodies

    def noted(self: BatchOverlap, inputs: Any, contexts: Any, share_a_request: bool) -> Any:
        cuts.append(share_a_request)
        return bodies(self, inputs, contexts, share_a_request)

    monkeypatch.setattr(BatchOverlap, "bodies", noted)
    settings = {"enable_dbo": True, "dbo_prefill_token_threshold": threshold}
    with engine_of(cache, 2, "full_and_piecewise", small, "inductor", **settings) as engine:
        cuts.clear()  # of memory's measurement
        assert_alike(answers(engine), alone)
        assert_alike(answers(engine), alone)
    assert True in cuts


def test_ranks_verify_drafts_in_one_launch(cache, small, monkeypatch):
    """N-grams are drafted on the device of each rank, and accepted by rank 0's choice."""
    launches, launch = [], VerifyGraphs.launch

    def noted(graphs, fields, *of_step):
        launches.append(bool((fields[:, 1] < 0).any()))  # one was in flight
        return launch(graphs, fields, *of_step)

    monkeypatch.setattr(VerifyGraphs, "launch", noted)
    repeated = [(list(range(3, 3 + count)) * 20)[:90] for count in (3, 7, 1, 12, 2)]
    kinds = [GREEDY, replace(GREEDY, max_tokens=64), SamplingParams(temperature=0.7, seed=2, max_tokens=40)]
    params = [replace(kinds[index % 3], ignore_eos=True, detokenize=False, logprobs=1) for index in range(15)]
    found, unscored = [], []
    for asked in ({"method": "none"}, {"method": "ngram", "num_speculative_tokens": 3}):
        config = config_of(cache, 2, "full_and_piecewise", small, "inductor")
        section = type(config.speculative).model_validate(asked)
        with Engine(config.model_copy(update={"speculative": section})) as engine:
            found.append(answers(engine, repeated * 3, params))
            ahead = engine.generate(repeated * 3, [replace(one, logprobs=None) for one in params])
            unscored.append([output.token_ids for output in ahead])
            drafts = engine.stats().drafts
    assert len(launches) > 20, "the start has left them out"
    assert any(launches)
    assert drafts > 0
    assert_alike(*found)
    assert sum(one == other for one, other in zip(*unscored, strict=True)) >= 8


def test_pieces_as_traced_answer_alike_on_two_gpus(cache):
    model = {"path": str(TINY)}
    with engine_of(cache, 1, "none", model, "eager") as engine:
        theirs = answers(engine)
    with engine_of(cache, 2, "none", model, "eager") as engine:
        assert_alike(answers(engine), theirs)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_weights_in_few_bits_answer_as_on_one_gpu(cache, small, quantization):
    model = small | {"quantization": quantization}
    with engine_of(cache, 1, "none", model, "inductor") as engine:
        theirs = answers(engine)
    with engine_of(cache, 2, "full_and_piecewise", model, "inductor") as engine:
        assert_alike(answers(engine), theirs)


def test_draws_of_one_seed_are_the_same_twice(cache, small):
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=16, ignore_eos=True, detokenize=False)
    with engine_of(cache, 2, "full_and_piecewise", small, "inductor") as engine:
        first = [output.token_ids for output in engine.generate(PROMPTS, drawn)]
        engine.flush_prefix_cache()  # of a prompt with hits other rows are computed together, and rounded otherwise
        assert [output.token_ids for output in engine.generate(PROMPTS, drawn)] == first


@pytest.mark.slow
def test_two_thousand_requests_all_end_and_leave_nothing_behind(cache, small):
    """1,920 tokens, where 64 requests of 92 on average want 5,888. 20 s on two H200s, behind the start."""
    limits = {"page_size": 16, "max_running_requests": 64, "max_num_batched_tokens": 1024}
    config = config_of(cache, 2, "full_and_piecewise", small, "inductor", **limits)
    with engine_of_pages(config, 121) as engine:
        result = run_soak(engine, 2000, SHAPE["vocab_size"], max_prompt=24, max_output=160, in_flight=128)
    print(result)
    assert result.preemptions > 0
    assert result.finished["abort"] > 40
    assert result.host_mib < 64
    assert result.device_mib < 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_every_request_with_its_reason(cache, small, how):
    before = set(followers())
    with engine_of(cache, 2, "full_and_piecewise", small, "inductor") as engine:
        (follower,) = set(followers()) - before
        endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        for stream in streams:
            next(stream)
        os.kill(follower, how)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="rank 1"):
                for _ in stream:
                    pass
    assert set(followers()) == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_in_steps_in_halves_ends_every_request_that_was_not_over(cache, small, how):
    before = set(followers())
    settings = {"enable_dbo": True, "dbo_prefill_token_threshold": 32, "enable_prefix_cache": False}
    with engine_of(cache, 2, "full_and_piecewise", small, "inductor", **settings) as engine:
        (follower,) = set(followers()) - before
        first_token = replace(GREEDY, max_tokens=1, logprobs=None)
        streams = [engine.stream([3 + index, *range(5, 905)], first_token) for index in range(400)]
        next(streams[0])
        os.kill(follower, how)
        num_lost = 0
        for stream in streams[1:]:
            try:
                assert all(output.error is None for output in stream)
            except EngineDeadError as error:
                assert "rank 1" in str(error)
                num_lost += 1
        assert num_lost > 0
    assert set(followers()) == before


def test_two_gpus_take_images_which_rank_0_encodes(tmp_path):
    save_vision_model("qwen3_vl", tmp_path / "model", wide=True)
    prompts = [
        media_prompt([5, 6, 92], image(2, (1, 8, 14)), [93, 7, 8, 92], image(1, (1, 4, 6)), [93, 9]),
        media_prompt([11, 92], image(3, (1, 16, 22)), [93, 12, 13]),
        [3, 4, 5, 6, 7],
    ]
    found = []
    for num_ranks in (1, 2):
        model = {"path": str(tmp_path / "model")}
        with engine_of(tmp_path / "cache", num_ranks, "full_and_piecewise", model, "eager") as engine:
            found.append(engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1, logprobs=1)))
    for one, other in zip(*found, strict=True):
        (first,), (second,) = one.logprobs, other.logprobs
        token = one.token_ids[0]
        assert token in second, "the likeliest of one rank is among the likeliest of two"
        assert abs(first[token].logprob - second[token].logprob) < LARGEST_DIFFERENCE
