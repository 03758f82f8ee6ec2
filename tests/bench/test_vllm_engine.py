"""A stand-in for vLLM is told of weights in few bits, and of images as pixels with a placeholder each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.workloads import Call
from tests.bench.test_worker import SETTING

ADAPTER = "mllm_compile.bench.adapters.vllm_engine"
NAMES = ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.inputs", "vllm.sampling_params")
NAMES += ("vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm")


class StandInLLM:
    def __init__(self, **options: Any) -> None:
        self.options = options

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.prompts = prompts
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * one["max_tokens"])]) for one in params]


@pytest.fixture
def adapter(monkeypatch) -> Iterator[ModuleType]:
    pytest.importorskip("PIL")
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    said = {"__version__": "9", "LLM": StandInLLM, "SamplingParams": dict}
    vars(sys.modules["vllm"]).update(said)
    sys.modules["vllm.engine.arg_utils"].AsyncEngineArgs = dict
    sys.modules["vllm.inputs"].TokensPrompt = dict
    sys.modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(DELTA="delta")
    sys.modules["vllm.v1.engine.async_llm"].AsyncLLM = object
    sys.modules.pop(ADAPTER, None)
    yield import_module(ADAPTER)
    del sys.modules[ADAPTER]


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        ("none", {}),
        ("keep", {}),  # its config.json tells vLLM, too
        ("fp8", {"quantization": "fp8"}),
        (
            "int4",
            {
                "hf_overrides": {
                    "quantization_config": {
                        "quant_method": "gptq",
                        "bits": 4,
                        "group_size": 128,
                        "sym": True,
                        "desc_act": False,
                    }
                }
            },
        ),
    ],
)
def test_random_weights_are_in_as_few_bits_as_ours(adapter, quantization, told):
    setting = replace(SETTING, random_weights=True, quantization=quantization)
    options = adapter.open_engine(setting)._llm.options
    assert options["load_format"] == "dummy"
    assert {name: value for name, value in options.items() if name in ("quantization", "hf_overrides")} == told


@pytest.mark.parametrize("quantization", ["int4", "int8", "dequantize", "keep_a8"])
def test_what_vllm_does_not_make_of_a_checkpoint_is_refused(adapter, quantization):
    setting = replace(SETTING, random_weights=False, quantization=quantization)
    with pytest.raises(BenchmarkError, match=rf"model\.quantization is {quantization}, which vLLM does not do"):
        adapter.open_engine(setting)


def test_a_head_that_vllm_does_not_quantise_is_refused(adapter):
    setting = replace(SETTING, random_weights=True, quantization="fp8", lm_head_quantization="fp8")
    with pytest.raises(BenchmarkError, match=r"model\.lm_head_quantization is fp8, which vLLM does not do"):
        adapter.open_engine(setting)


def test_it_is_given_pixels_and_one_placeholder_an_image(adapter, tmp_path):
    config = '{"image_token_id": 77, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}'
    (tmp_path / "config.json").write_text(config)
    setting = replace(SETTING, model_folder=str(tmp_path))
    with pytest.raises(BenchmarkError, match="vLLM takes images through the model's processor"):
        adapter.open_images(setting)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    engine = adapter.open_images(setting)
    assert engine.num_features(280) == 100
    image = engine.image(280, seed=1)
    assert image.size == (280, 280) and image.tobytes() != engine.image(280, seed=2).tobytes()
    engine.generate(Call(prompts=[engine.prompt([1, 2], image, [3]), [4, 5]], max_tokens=[2, 2]))
    first, second = engine._llm.prompts
    assert (first["prompt_token_ids"], first["multi_modal_data"]) == ([1, 2, 77, 3], {"image": image})
    assert second == {"prompt_token_ids": [4, 5]}
    assert engine._llm.options["skip_tokenizer_init"] is False, "its processor needs the tokenizer"
