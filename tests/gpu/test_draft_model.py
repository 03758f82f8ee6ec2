"""A draft model on a GPU: the model itself is nearly always right, in graphs and without, and answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from tests.gpu.small_shape import ONE_RUNTIME
from tests.tiny_model import TINY, shallow_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = ["x = 1\n" * 40, "The for statement is used to iterate over the elements of a sequence", "A"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, and a draft model of one layer."""
    made = tmp_path_factory.mktemp("drafts")
    shallow_tiny(made / "shallow")
    return made


def answers(
    folder: Path, params: SamplingParams, drafter: Path | None, mode: str = "auto", **runtime: Any
) -> tuple[list[RequestOutput], Any]:
    speculative = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 4}
    sections = {
        "model": {"path": str(TINY), "dtype": "bfloat16"},
        "cudagraph": {"mode": mode},
        "runtime": {"device": "cuda"} | ONE_RUNTIME | runtime,
        "cache": {"dir": str(folder / "cache")},
    } | ({} if drafter is None else {"speculative": speculative})
    with Engine(EngineConfig.from_dict(sections)) as engine:
        outputs = engine.generate(PROMPTS, params)
        outputs += engine.generate(PROMPTS, params)  # with prefix hits
        return outputs, engine.stats()


@pytest.mark.parametrize("mode", ["auto", "none"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_model_itself_drafts_nearly_every_token(folder, mode, temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=96, ignore_eos=True)
    _, stats = answers(folder, params, TINY, mode)
    assert stats.acceptance_length > 4, "of 5; two shapes of a step differ in bfloat16's last bits"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_deterministic_steps_give_the_same_tokens_and_bits(folder, temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=64, ignore_eos=True, logprobs=1)
    plain, _ = answers(folder, params, None, deterministic=True)
    drafted, stats = answers(folder, params, folder / "shallow", deterministic=True)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
