"""A DFlash head on a GPU, in graphs of verify steps and beside them: one that is right drafts every token, a random one
changes no bit of deterministic steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from tests.dflash_heads import echo, random_dflash_head
from tests.tiny_model import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MOST = 7


def config_of(cache: Path, model: Path, head: Path | None, mode: str = "auto", **runtime: Any) -> EngineConfig:
    speculative = {"method": "dflash", "model": str(head), "num_speculative_tokens": MOST}
    sections = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "cudagraph": {"mode": mode},
        "runtime": {"device": "cuda", "max_model_len": 256, "max_running_requests": 16} | runtime,
        "speculative": {} if head is None else speculative,
        "cache": {"dir": str(cache)},
    }
    return EngineConfig.from_dict(sections)


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_a_head_that_is_right_drafts_every_token(tmp_path, mode):
    model, head = echo(tmp_path, head_dim=128)
    prompts = [[5, 9, 2], [1] * 90, [7, 8], list(range(21))] * 3
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with Engine(config_of(tmp_path / "cache", model, head, mode)) as engine:
        found = [output.token_ids for output in engine.generate(prompts, params)]
        stats = engine.stats()
    assert found == [[prompt[-1]] * 60 for prompt in prompts]
    assert stats.accepted_tokens > 0.8 * 60 * len(prompts) * MOST / (MOST + 1)
    assert stats.acceptance_length > MOST


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_random_head_changes_no_bit_of_deterministic_steps(tmp_path, temperature):
    head = random_dflash_head(tmp_path / "head", TINY)
    prompts = ["x = 1\n" * 40, "The for statement is used to iterate over", "A"]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=64, ignore_eos=True)
    answers = []
    for one in (None, head):
        with Engine(config_of(tmp_path / "cache", TINY, one, deterministic=True)) as engine:
            answers.append([output.token_ids for output in engine.generate(prompts, params)])
            assert one is None or engine.stats().drafts > 0
    assert answers[0] == answers[1]
