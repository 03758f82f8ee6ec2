"""vLLM with its defaults, where it is installed."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from vllm import LLM, SamplingParams

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters.base import check_output
from mllm_compile.bench.measure.images import features_a_side
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import Call
from mllm_compile.media.files import CONFIG_FILE, PROCESSOR_FILES
from mllm_compile.runtime.quantised.scheme import INT4_GROUP

GPU_MEMORY_UTILIZATION = 0.85
# What a checkpoint of GPTQ's says that has what we make of plain weights: vLLM makes random ones of it, as of any.
_INT4_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": INT4_GROUP, "sym": True, "desc_act": False}


def settings_of(setting: Setting) -> dict[str, Any]:
    """The arguments of vLLM for a setting.

    Raises:
        BenchmarkError: it cannot do the config's quantisation.
    """
    quantization, is_random = setting.quantization, setting.random_weights
    if quantization in ("dequantize", "int8", "keep_a8") or (quantization == "int4" and not is_random):
        raise BenchmarkError(
            f"model.quantization is {quantization}, which vLLM does not do while it reads a checkpoint. Set it to auto "
            "or fp8, set model.load_format: dummy for int4, or measure mllm alone."
        )
    if setting.lm_head_quantization != "none":
        raise BenchmarkError(
            f"model.lm_head_quantization is {setting.lm_head_quantization}, which vLLM does not do while it reads a "
            "checkpoint. Leave it out, or measure mllm alone."
        )
    settings: dict[str, Any] = {
        "dtype": setting.dtype,
        "load_format": "dummy" if is_random else "auto",
        "max_model_len": setting.max_model_len,
        "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "trust_remote_code": setting.trust_remote_code,
        "tensor_parallel_size": setting.num_ranks,
    }
    if quantization == "fp8":
        settings["quantization"] = "fp8"
    elif quantization == "int4":
        settings["hf_overrides"] = {"quantization_config": _INT4_CONFIG}
    return settings


class VllmEngine:
    """See BenchEngine."""

    version = vllm.__version__

    def __init__(self, setting: Setting, **further: Any) -> None:
        self.start_parts: dict[str, float] = {}
        self.kv_tokens = None
        self.settings = settings_of(setting) | further
        self._llm = LLM(model=setting.model_folder, disable_log_stats=True, **self.settings)

    def generate(self, call: Call) -> None:
        params = [
            SamplingParams(temperature=call.temperature, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in call.max_tokens
        ]
        prompts = [prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt} for prompt in call.prompts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        check_output(call, [len(output.outputs[0].token_ids) for output in outputs])

    def close(self) -> None:
        del self._llm  # its engine process ends with it


class VllmTexts(VllmEngine):
    """Embeds texts of token ids."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, runner="pooling")

    def embed(self, texts: list[list[int]]) -> None:
        self._llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)


class VllmImages(VllmEngine):
    """See ImageEngine. Images are pixels: what the model's processor takes for a new one is part of the times."""

    def __init__(self, setting: Setting) -> None:
        folder = Path(setting.model_folder)
        names = ", ".join(PROCESSOR_FILES)
        if not any((folder / name).exists() for name in PROCESSOR_FILES):
            raise BenchmarkError(
                f"vLLM takes images through the model's processor, and {folder} has none ({names}). "
                "Give a model that has one, or measure mllm alone."
            )
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        self._folder, self._placeholder = setting.model_folder, int(config["image_token_id"])
        super().__init__(setting, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1, "video": 0})

    def image(self, side: int, seed: int) -> Any:
        from PIL import Image

        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
        return Image.fromarray(pixels)

    def num_features(self, side: int) -> int:
        return features_a_side(self._folder, side) ** 2

    def prompt(self, before: list[int], image: Any, after: list[int]) -> Any:
        token_ids = [*before, self._placeholder, *after]
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": image}}


class VllmStreams:
    """See StreamEngine."""

    version = vllm.__version__

    def __init__(self, setting: Setting) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.settings = settings_of(setting)
        arguments = AsyncEngineArgs(model=setting.model_folder, disable_log_stats=True, **self.settings)
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._ids = itertools.count()

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, str(next(self._ids))):
            yield len(output.outputs[0].token_ids)

    async def close(self) -> None:
        self._engine.shutdown()


def open_images(setting: Setting) -> VllmImages:
    """Compiles first when nothing in vLLM's cache fits.

    Raises:
        BenchmarkError: the model's folder has no processor.
    """
    return VllmImages(setting)


def open_streams(setting: Setting) -> VllmStreams:
    """Compiles first when nothing in vLLM's cache fits."""
    return VllmStreams(setting)


def open_engine(setting: Setting) -> VllmEngine:
    """Compiles first when nothing in vLLM's cache fits."""
    return VllmEngine(setting)
