"""A model whose layers are cut into two stages, on two GPUs, against one GPU.

Run by themselves: python -m pytest tests/gpu/test_stages.py. They skip themselves with fewer GPUs.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.errors import EngineDeadError
from tests.e2e.test_ranks import followers
from tests.gpu.small_shape import SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs"),
]

PROMPTS = [[3 + (7 * start + i) % 90 for i in range(length)] for start, length in enumerate((1, 5, 30, 200, 7, 64, 17))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("stages")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 4}))
    return folder


@contextmanager
def engine_of(folder: Path, num_stages: int, dtype: str, backend: str, mode: str) -> Iterator[Engine]:
    sections: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": dtype, "load_format": "dummy"},
        "compile": {"backend": backend},
        "runtime": {
            "device": "cuda",
            "pipeline_parallel_size": num_stages,
            "max_model_len": 1024,
            "max_running_requests": 8,
            "max_num_batched_tokens": 128,
            "mem_fraction_static": 0.3,
        },
        "cudagraph": {"mode": mode},
        "cache": {"dir": str(folder / "cache")},
    }
    with Engine(EngineConfig.from_dict(sections)) as engine:
        yield engine


def answers(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Tokens of each prompt, and their log-probabilities."""
    outputs = engine.generate(PROMPTS, GREEDY)
    assert all(output.error is None for output in outputs)
    scores = [
        [entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    return list(zip([output.token_ids for output in outputs], scores, strict=True))


@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_two_stages_give_one_gpus_tokens_in_float32(folder, mode):
    found = []
    for num_stages in (1, 2):
        with engine_of(folder, num_stages, "float32", "eager", mode) as engine:
            found.append([answers(engine), answers(engine)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        for (_, mine), (_, yours) in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(yours, abs=1e-4)


def test_two_stages_in_graphs_of_pieces_give_one_gpus_tokens_in_bfloat16(folder):
    found = []
    for num_stages in (1, 2):
        with engine_of(folder, num_stages, "bfloat16", "inductor", "piecewise") as engine:
            found.append(answers(engine))
    first = [(mine[0][0], yours[0][0], mine[1][0], yours[1][0]) for mine, yours in zip(*found, strict=True)]
    assert all(mine == yours for mine, yours, _, _ in first)
    assert all(abs(mine - yours) < 0.05 for _, _, mine, yours in first)


def test_a_stage_that_is_killed_ends_every_request_with_its_reason(folder):
    before = set(followers())
    with engine_of(folder, 2, "float32", "eager", "none") as engine:
        (follower,) = set(followers()) - before
        endless = SamplingParams(temperature=0, max_tokens=800, ignore_eos=True, detokenize=False)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        os.kill(follower, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was ended by signal 9"):
                for _ in stream:
                    pass
    assert set(followers()) == before
