"""A model's prediction layer on a GPU: one that is right drafts every token, in the graphs of verify steps. The start
has compared its drafts with those of the same rows as prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from tests.gpu.small_shape import ONE_RUNTIME, WIDE
from tests.prediction_layers import be_right, save_with_prediction_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ARCHITECTURES = ("qwen3_5_text", pytest.param("glm4_moe", marks=pytest.mark.slow))  # with a state, and without
PROMPTS = [[5, 9, 2], [1] * 90, [7, 8], list(range(3, 24))] * 3
NEW = 40


def config_of(folder: Path, method: str = "mtp", **runtime: Any) -> EngineConfig:
    drafts = {} if method == "none" else {"num_speculative_tokens": 3}
    return EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
            "runtime": {"device": "cuda", "max_model_len": 256, "max_total_tokens": 4096} | ONE_RUNTIME | runtime,
            "speculative": {"method": method} | drafts,
            "cache": {"dir": str(folder / "cache")},
        }
    )


@pytest.fixture(scope="module", params=ARCHITECTURES)
def right(request, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp(request.param)
    save_with_prediction_layer(request.param, folder / "model", max_position_embeddings=512, **WIDE)
    return folder, be_right(folder / "model")


def test_a_layer_that_is_right_drafts_every_token_in_graphs(right, monkeypatch):
    folder, behind = right
    chained, launch = [], VerifyGraphs.launch

    def noted(graphs, fields, *of_step):
        chained.append(graphs.chain is not None)
        return launch(graphs, fields, *of_step)

    monkeypatch.setattr(VerifyGraphs, "launch", noted)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with Engine(config_of(folder)) as engine:
        rounds = [[output.token_ids for output in engine.generate(PROMPTS, params)] for _ in range(2)]
        stats = engine.stats()
    for prompt, *answers in zip(PROMPTS, *rounds, strict=True):  # the second behind prefix hits
        expected = [prompt[-1]]
        for _ in range(NEW):
            expected.append(int(behind[expected[-1]]))
        assert answers == [expected[1:]] * 2
    assert len(chained) > 20, "the start has left them out"
    assert all(chained)
    # While a step is in flight some drafts go on behind an answer's end.
    assert stats.accepted_tokens >= stats.drafted_tokens - 3 * 2 * len(PROMPTS) > 0
    assert stats.acceptance_length > 3
