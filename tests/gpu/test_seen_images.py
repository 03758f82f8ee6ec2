"""Images that layers attend to (Mllama), in bfloat16: as near to Transformers in float32 as it is in bfloat16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from tests.gpu.test_served_models import off_by
from tests.tiny_seen_images import Tiled, prompt_of, save_mllama, scores_of_answer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = "cuda:0"
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # four heads of 64
SCORED = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
MARGIN = 1.5  # of the error of Transformers in bfloat16
PROMPTS: list[Any] = [
    prompt_of([5, 6], Tiled(1, 2), [7, 8] * 20),
    prompt_of([5] * 30, Tiled(2, 3), [7, 8], Tiled(3, 1), [9, 9] * 30),
    list(range(3, 60)),
    prompt_of(Tiled(4, 4), [3, 4]),
    prompt_of([3], Tiled(5, 1), Tiled(6, 2), [8, 9, 10]),
]


def config_of(folder: Path) -> dict[str, Any]:
    limits = {"max_model_len": 256, "max_running_requests": 8, "max_num_batched_tokens": 64}
    return {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "runtime": {"device": DEVICE, "mem_fraction_static": 0.3, "cascade_attention": False, **limits},
        "cudagraph": {"decode_requests": [1, 8], "piecewise_tokens": [8, 16]},
        "cache": {"dir": str(folder / "cache")},
    }


@torch.no_grad()
def test_they_are_as_near_to_float32_as_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = save_mllama(tmp_path / "model", **WIDE)
    with Engine(config_of(tmp_path)) as engine:
        outputs = engine.generate(PROMPTS, SCORED)
        again = engine.generate(PROMPTS, SCORED)
    model = model.to(DEVICE)
    in_bfloat16 = copy.deepcopy(model).to(torch.bfloat16)
    for found in (outputs, again):
        ours: list[float] = []
        exact, rounded = [], []
        for output, prompt in zip(found, PROMPTS, strict=True):
            assert output.error is None and output.logprobs is not None
            ids = output.token_ids
            ours += [scores[token].logprob for scores, token in zip(output.logprobs, ids, strict=True)]
            exact.append(scores_of_answer(model, prompt, ids))
            rounded.append(scores_of_answer(in_bfloat16, prompt, ids))
        want = torch.cat(exact)
        error, noise = off_by(torch.tensor(ours), want), off_by(torch.cat(rounded), want)
        print(f"off by {error:.4f}, Transformers in bfloat16 by {noise:.4f}", flush=True)
        assert noise > 1e-3 and error <= MARGIN * noise + 1e-3
