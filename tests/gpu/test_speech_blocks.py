"""Phi-4-multimodal's sounds on a GPU in bfloat16: as near to Transformers in float32 as it is in bfloat16."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from tests.gpu.test_served_models import off_by
from tests.tiny_sounds import Sound
from tests.tiny_speech import logprobs, save_speech_model, speech_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # four heads of 64
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
MARGIN = 1.5  # of the error of Transformers in bfloat16
PROMPTS = [
    speech_prompt([5, 6], Sound(1, 40), [7, 8] * 20),
    speech_prompt([11] * 9, Sound(4, 300), [12] * 5, Sound(2, 9), [4] * 30),
    speech_prompt([5, 6], Sound(3, 4000 + 37), [7] * 20),
]


def test_they_are_as_near_to_float32_as_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = save_speech_model(tmp_path / "model", **WIDE)
    limits = {"max_model_len": 1024, "max_running_requests": 8, "max_num_batched_tokens": 1024}
    config = {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "runtime": {"device": "cuda:0", "mem_fraction_static": 0.3, "cascade_attention": False, **limits},
        "cudagraph": {"decode_requests": [1, 8], "piecewise_tokens": [8, 16]},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    with Engine(config) as engine:
        outputs = engine.generate(PROMPTS, SCORED)
    ours: list[float] = []
    for output in outputs:
        assert output.error is None and output.prompt_logprobs is not None
        ours += [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:] if entry]
    model = model.to("cuda:0")
    in_bfloat16 = copy.deepcopy(model).to(torch.bfloat16)
    want = torch.cat([logprobs(model, prompt) for prompt in PROMPTS]).float()
    rounded = torch.cat([logprobs(in_bfloat16, prompt) for prompt in PROMPTS]).float()
    error, noise = off_by(torch.tensor(ours), want), off_by(rounded, want)
    print(f"off by {error:.4f}, Transformers in bfloat16 by {noise:.4f}", flush=True)
    assert noise > 1e-3 and error <= MARGIN * noise + 1e-3
