"""ModelRunner driven by hand on a GPU: the tokens of Engine.generate, with an image too."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams, open_model
from tests.gpu.graph_cases import DECODE_REQUESTS, PIECEWISE_TOKENS
from tests.gpu.test_images import PROMPTS as WITH_IMAGES
from tests.gpu.test_images import config_of
from tests.tiny_model import tiny_config
from tests.tiny_vision import save_vision_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "low_level.py"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def by_hand(config: EngineConfig, prompts: list[Any]) -> list[list[int]]:
    serve, opened = runpy.run_path(str(EXAMPLE))["serve"], open_model(config)
    opened.runner.initialize()
    try:
        return [serve(opened.runner, opened.read(prompt), GREEDY.max_tokens) for prompt in prompts]
    finally:
        opened.runner.shutdown()


def by_engine(config: EngineConfig, prompts: list[Any]) -> list[list[int]]:
    with Engine(config) as engine:
        return [engine.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_a_prompt_by_hand_has_the_tokens_of_generate(tmp_path: Path, mode: str) -> None:
    """The config of graph_cases.make_gpu_runner."""
    config = tiny_config(
        tmp_path,
        model={"dtype": "bfloat16"},
        compile={"backend": "eager"},
        runtime={
            "device": "cuda",
            "page_size": 64,
            "max_running_requests": DECODE_REQUESTS[-1],
            "max_num_batched_tokens": 128,
            "max_model_len": 512,
            "mem_fraction_static": 0.3,
        },
        cudagraph={"mode": mode, "decode_requests": DECODE_REQUESTS, "piecewise_tokens": PIECEWISE_TOKENS}
        if mode != "none"
        else {"mode": "none"},
    )
    prompts = ["Return a new", "def copy(x, memo):"]
    assert by_hand(config, prompts) == by_engine(config, prompts)


def test_a_prompt_with_images_by_hand_has_the_tokens_of_generate(tmp_path: Path) -> None:
    save_vision_model("qwen3_vl", tmp_path / "model", wide=True)
    config = config_of(tmp_path, "none")
    prompts = WITH_IMAGES[:1]
    assert by_hand(config, prompts) == by_engine(config, prompts)
