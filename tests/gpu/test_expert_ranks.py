"""A mixture whose experts are spread over two GPUs, as traced against one GPU, and in every graph mode.

Run by themselves: python -m pytest tests/gpu/test_expert_ranks.py. They skip themselves with fewer GPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.errors import EngineDeadError
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from tests.e2e.test_ranks import followers
from tests.gpu.test_served_models import reference, reference_scores
from tests.model.tiny_configs import save_tiny_model, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs"),
]

MODES = ("full_and_piecewise", "piecewise", "none")
# Times Transformers' own error in bfloat16, whose rounding too sends tokens to other experts.
MARGIN = 1.5
PROMPTS = [[3 + (7 * start + i) % 90 for i in range(length)] for start, length in enumerate((1, 5, 30, 200, 7, 64, 17))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("mixture")
    save_tiny_model(
        tiny_config("qwen3_moe", head_dim=128, hidden_size=512, max_position_embeddings=2048), folder / "model"
    )
    return folder


@contextmanager
def engine_of(folder: Path, num_ranks: int, mode: str, backend: str, dtype: str, **more: object) -> Iterator[Engine]:
    runtime = {
        "device": "cuda",
        "expert_parallel_size": num_ranks,
        "max_model_len": 1024,
        "max_running_requests": 8,
        "max_num_batched_tokens": 128,
        "mem_fraction_static": 0.3,
    }
    sections = {
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "compile": {"backend": backend},
        "runtime": runtime,
        "cudagraph": {"mode": mode},
        "cache": {"dir": str(folder / "cache")},
    } | more
    engine = Engine(EngineConfig.from_dict(sections))
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], list[float]]]:
    """Tokens of each prompt, and their log-probabilities."""
    outputs = engine.generate(prompts, GREEDY)
    assert all(output.error is None for output in outputs)
    scores = [
        [entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    return list(zip([output.token_ids for output in outputs], scores, strict=True))


def test_pieces_as_traced_give_one_gpus_tokens_in_float32(folder):
    found = []
    for num_ranks in (1, 2):
        with engine_of(folder, num_ranks, "none", "eager", "float32") as engine:
            found += [[tokens for tokens, _ in answers(engine)] for _ in range(2)]  # with hits of the prefix cache
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_answer_as_near_to_float32_as_transformers_does_in_every_graph_mode(folder, mode):
    assert_near_to_float32(folder, mode)


def test_so_do_layers_with_a_state(tmp_path):
    sizes = {"head_dim": 128, "hidden_size": 512, "max_position_embeddings": 2048}
    save_tiny_model(tiny_config("qwen3_next", **sizes), tmp_path / "model")
    assert_near_to_float32(tmp_path, "full_and_piecewise")


def test_drafts_are_verified_in_one_launch_with_the_same_scores(folder, monkeypatch):
    launches, launch = [], VerifyGraphs.launch
    monkeypatch.setattr(VerifyGraphs, "launch", lambda *of: launches.append(len(of[1])) or launch(*of))
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    assert_near_to_float32(folder, "full_and_piecewise", speculative=speculative)
    assert len(launches) > 20, "the start has left them out"


def assert_near_to_float32(folder: Path, mode: str, **more: object) -> None:
    with engine_of(folder, 2, mode, "inductor", "bfloat16", **more) as engine:
        found = [answers(engine), answers(engine)]  # with hits of the prefix cache
        found += [answers(engine, [prompt]) for prompt in PROMPTS[:3]]  # while the other rank has nothing to do
    exact, rounded = reference(folder / "model", torch.float32), reference(folder / "model", torch.bfloat16)
    prompts = [*PROMPTS, *PROMPTS, *PROMPTS[:3]]
    ours, theirs = [], []
    for prompt, (tokens, scores) in zip(prompts, [one for each in found for one in each], strict=True):
        wanted, of_rounded = (reference_scores(model, prompt + tokens)[-len(tokens) :] for model in (exact, rounded))
        ours.append((torch.tensor(scores) - wanted).abs())
        theirs.append((of_rounded - wanted).abs())
    error, limit = (torch.cat(one).mean().item() for one in (ours, theirs))
    print(f"{mode}: off by {error:.5f}, Transformers in bfloat16 by {limit:.5f}; worst {max(map(max, ours)):.3f}")
    assert error <= MARGIN * limit + 1e-4


def test_a_lost_rank_ends_every_request_with_its_reason(folder):
    before = set(followers())
    with engine_of(folder, 2, "full_and_piecewise", "inductor", "bfloat16") as engine:
        (follower,) = set(followers()) - before
        endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        for stream in streams:
            next(stream)
        os.kill(follower, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="rank 1"):
                for _ in stream:
                    pass
    assert set(followers()) == before
