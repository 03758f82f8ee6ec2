"""A mixture whose experts are spread over two GPUs against one, as traced and in every graph mode.

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
from tests.e2e.test_ranks import followers
from tests.model.tiny_configs import save_tiny_model, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs"),
]

MODES = ("full_and_piecewise", "piecewise", "none")
# Of first tokens, on average: in bfloat16 rounding sends tokens to other experts.
LARGEST_DIFFERENCE = 0.05
PROMPTS = [[3 + (7 * start + i) % 90 for i in range(length)] for start, length in enumerate((1, 5, 30, 200, 7, 64, 17))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("mixture")
    save_tiny_model(tiny_config("qwen3_moe", head_dim=128, hidden_size=512), folder / "model")
    return folder


@contextmanager
def engine_of(folder: Path, num_ranks: int, mode: str, backend: str, dtype: str) -> Iterator[Engine]:
    runtime = {
        "device": "cuda",
        "expert_parallel_size": num_ranks,
        "max_model_len": 512,
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
    }
    engine = Engine(EngineConfig.from_dict(sections))
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: Engine) -> list[tuple[list[int], float]]:
    """Tokens of each prompt, and the log-probability of the first."""
    outputs = engine.generate(PROMPTS, GREEDY)
    assert all(output.error is None for output in outputs)
    return [(output.token_ids, output.logprobs[0][output.token_ids[0]].logprob) for output in outputs]


def test_pieces_as_traced_give_one_gpus_tokens_in_float32(folder):
    found = []
    for num_ranks in (1, 2):
        with engine_of(folder, num_ranks, "none", "eager", "float32") as engine:
            found.append([tokens for tokens, _ in answers(engine)])
            found.append([tokens for tokens, _ in answers(engine)])  # with hits of the prefix cache
    assert found[0] == found[1] == found[2] == found[3]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[list[int], float]]:
    with engine_of(folder, 1, "none", "inductor", "bfloat16") as engine:
        return answers(engine)


@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_answer_as_one_in_every_graph_mode(folder, alone, mode):
    with engine_of(folder, 2, mode, "inductor", "bfloat16") as engine:
        for _ in range(2):
            ours = answers(engine)
            differences = [abs(one - other) for (_, one), (_, other) in zip(ours, alone, strict=True)]
            same = sum(one == other for (one, _), (other, _) in zip(ours, alone, strict=True))
            print(f"{mode}: {same} of {len(ours)} answers are equal, first tokens off by {differences}")
            assert sum(differences) / len(differences) < LARGEST_DIFFERENCE
            assert same >= len(ours) // 2
        one = engine.generate(PROMPTS[2], GREEDY)[0]  # while the other rank has nothing to do
        assert one.token_ids[0] == alone[2][0][0]


def test_a_lost_rank_ends_every_request_with_its_reason(folder):
    before = set(followers())
    with engine_of(folder, 2, "full_and_piecewise", "inductor", "bfloat16") as engine:
        (follower,) = set(followers()) - before
        endless = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        for stream in streams:
            next(stream)
        os.kill(follower, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="rank 1"):
                for _ in stream:
                    pass
    assert set(followers()) == before
