"""New weights under captured graphs on a GPU: answers then equal a fresh start's bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine
from tests.e2e.test_weight_updates import Model, answers, parameters_of, tensors_of, write_changed
from tests.gpu.small_shape import WIDE
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MODELS = [Model("qwen3"), Model("qwen3", "fp8"), Model("qwen3_moe", "int4"), Model("qwen3_next")]
PROMPTS = [[token % 97 for token in range(start, start + 40)] for start in range(8)]
NUM_UPDATES = 40


def config_of(folder: Path, cache: Path, quantization: str) -> dict[str, Any]:
    return {
        "model": {"path": str(folder), "quantization": quantization, "dtype": "bfloat16"},
        "runtime": {"device": "cuda", "max_model_len": 256, "max_running_requests": 8},
        "cache": {"dir": str(cache)},
    }


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_answers_under_graphs_are_those_of_a_fresh_start(model, tmp_path):
    first = tmp_path / "first"
    save_tiny_model(shape_of(model.architecture, **WIDE, **dict(model.changes)), first)
    second = write_changed(first, tmp_path / "second")
    configs = [config_of(folder, tmp_path / "cache", model.quantization) for folder in (first, second)]
    with Engine(configs[1]) as fresh:
        expected = answers(fresh, PROMPTS)
    sent = [
        {name: one.cuda() for name, one in tensors.items()} for tensors in (parameters_of(second), tensors_of(first))
    ]
    with Engine(configs[0]) as engine:
        before = answers(engine, PROMPTS)
        engine.update_weights(sent[0].items())  # what is allocated once
        engine.update_weights(sent[1].items(), direct=True)
        taken = torch.cuda.memory_allocated()
        for number in range(NUM_UPDATES):
            engine.update_weights(sent[0].items(), direct=number % 4 == 0)
            assert answers(engine, PROMPTS) == expected != before
            engine.update_weights(sent[1].items(), direct=number % 4 == 2)
            assert answers(engine, PROMPTS) == before
        assert torch.cuda.memory_allocated() == taken


def test_updates_between_prompts_in_pieces(tmp_path):
    """Kernels that are launched early read weights before they wait: the swap waits for the device instead."""
    first = tmp_path / "first"
    save_tiny_model(shape_of("qwen3", **WIDE), first)
    second = write_changed(first, tmp_path / "second")
    sent = [{name: one.cuda() for name, one in tensors_of(folder).items()} for folder in (first, second)]
    prompts = [[token % 97 for token in range(start, start + 200)] for start in range(16)]
    config = config_of(first, tmp_path / "cache", "auto") | {"cudagraph": {"mode": "piecewise"}}
    with Engine(config) as engine:
        expected = []
        for tensors in sent:
            engine.update_weights(tensors.items())
            expected.append(answers(engine, prompts))
        for number in range(NUM_UPDATES):
            engine.update_weights(sent[number % 2].items())
            assert answers(engine, prompts) == expected[number % 2]
