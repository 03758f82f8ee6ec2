"""Runs Transformers' own generate, the baseline without any engine."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters.base import check_output
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import Call


class TransformersEngine:
    """See BenchEngine. PromptIds of several lengths are padded on the left, as its users do."""

    version = transformers.__version__

    def __init__(self, setting: Setting) -> None:
        if setting.num_ranks > 1:
            raise BenchmarkError("Transformers is measured on one device; leave --tensor-parallel-size out for it")
        self.start_parts: dict[str, float] = {}
        self.kv_tokens = None
        self.settings: dict[str, Any] = {"dtype": setting.dtype, "device": setting.device}
        self._device = torch.device(setting.device)
        dtype = getattr(torch, setting.dtype)
        options = {"dtype": dtype, "trust_remote_code": setting.trust_remote_code}
        model: Any
        if setting.random_weights:
            config = AutoConfig.from_pretrained(setting.model_folder, trust_remote_code=setting.trust_remote_code)
            with self._device:
                model = AutoModelForCausalLM.from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(setting.model_folder, **options)
            model.to(self._device)
        self.settings["attention"] = model.config._attn_implementation
        self._model = model.eval()

    def generate(self, call: Call) -> None:
        longest = max(map(len, call.prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in call.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in call.prompts])
        # All rows run until the longest answer is done; what a row makes beyond its own number is not counted.
        count = max(call.max_tokens)
        greedy = call.temperature == 0.0
        settings = GenerationConfig(
            max_new_tokens=count,
            do_sample=not greedy,
            temperature=None if greedy else call.temperature,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.inference_mode():
            output = self._model.generate(
                ids.to(self._device), attention_mask=mask.to(self._device), generation_config=settings
            ).cpu()
        made = output.shape[1] - longest
        check_output(call, [min(made, asked) for asked in call.max_tokens])

    def close(self) -> None:
        del self._model


def open_engine(setting: Setting) -> TransformersEngine:
    """Loads the model, or makes it with random weights on the device."""
    return TransformersEngine(setting)
