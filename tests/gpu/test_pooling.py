"""Models that pool on a GPU in bfloat16: as near to Transformers in float32 as Transformers in bfloat16 is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine
from tests.model.pooling_models import by_transformers, pooling_config, save_pooling_model, served

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HEADS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
# Full attention, a causal one, one with windows, one with a bias by distance, one with scores of distances.
MODELS: dict[str, dict[str, Any]] = {
    "BertModel": HEADS,
    "Qwen3Model": HEADS | {"num_key_value_heads": 2, "head_dim": 64},
    "ModernBertModel": HEADS,
    "MPNetModel": HEADS,
    "DebertaV2Model": HEADS,
    "BertForSequenceClassification": HEADS | {"num_attention_heads": 8},
}
LENGTHS = (7, 1, 150, 33, 64, 2, 65, 200)
SIZES = (16, 64, 256, 640)  # of graphs: one for all texts, and for each of them
MARGIN = 1.5  # of the mean error of Transformers in bfloat16


def random_texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]


def mean_error(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    found = np.concatenate([np.abs(one - other).ravel() for one, other in zip(ours, theirs, strict=True)])
    return float(found.mean())


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_step_is_as_near_to_float32_as_transformers_in_bfloat16(name: str, tmp_path: Path) -> None:
    model = save_pooling_model(name, tmp_path / "model", **MODELS[name])
    texts = random_texts()
    exact = by_transformers(model, texts)
    model = model.to("cuda", torch.bfloat16)
    with torch.device("cuda"):
        in_bfloat16 = [by_transformers_on_gpu(model, text) for text in texts]
    config = pooling_config(tmp_path / "model", tmp_path / "cache", "inductor", dtype="bfloat16", task=task_of(name))
    noise = mean_error(in_bfloat16, exact)
    for mode, graphs in (("auto", {"piecewise_tokens": list(SIZES)}), ("none", {"mode": "none"})):
        runtime = {"device": "cuda:0", "max_model_len": 254}
        with Engine(config | {"runtime": runtime, "cudagraph": graphs}) as engine:
            core: Any = engine.pooling.core
            assert (core._runner.graphs is not None) == (mode == "auto")
            together, alone = served(engine, texts), [served(engine, [text])[0] for text in texts]
        print(f"{name}, graphs {mode}: {mean_error(together, exact) / noise:.2f} of Transformers' error")
        assert mean_error(together, exact) <= MARGIN * noise
        assert mean_error(alone, exact) <= MARGIN * noise


def task_of(name: str) -> str:
    return "classify" if "For" in name else "embed"


@torch.no_grad()
def by_transformers_on_gpu(model: Any, text: list[int]) -> np.ndarray:
    output = model(input_ids=torch.tensor([text], device="cuda"))
    found = output.logits[0] if "logits" in output else output[0][0]
    return found.float().cpu().numpy()
