"""Images as vLLM gets them, with a stand-in for vLLM: pixels, and one placeholder for each."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.workloads import Call
from tests.bench.test_worker import SETTING

NAMES = ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.inputs", "vllm.sampling_params")
NAMES += ("vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm")


class StandInLLM:
    def __init__(self, **options: Any) -> None:
        self.options = options

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.prompts = prompts
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * one["max_tokens"])]) for one in params]


@pytest.fixture
def adapter(monkeypatch):
    pytest.importorskip("PIL")
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    said = {"__version__": "9", "LLM": StandInLLM, "SamplingParams": dict}
    vars(sys.modules["vllm"]).update(said)
    sys.modules["vllm.engine.arg_utils"].AsyncEngineArgs = dict
    sys.modules["vllm.inputs"].TokensPrompt = dict
    sys.modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(DELTA="delta")
    sys.modules["vllm.v1.engine.async_llm"].AsyncLLM = object
    monkeypatch.delitem(sys.modules, "mllm_compile.bench.adapters.vllm_engine", raising=False)
    from mllm_compile.bench.adapters import vllm_engine

    yield vllm_engine
    del sys.modules["mllm_compile.bench.adapters.vllm_engine"]


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
