"""The self-check runs the program for adapters: cut over ranks, over few bits, and a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mllm_compile.check.adapters import AdapterCase
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.resolution import resolve
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError, UnsupportedModelError
from mllm_compile.runtime.config_sections import LoraSection
from mllm_compile.runtime.program.spec import LoraProgram
from tests.tiny_model import shallow_tiny, tiny_config


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow_tiny(tmp_path_factory.mktemp("shallow") / "model")


def config(folder: Path, cache: Path, lora: dict[str, Any], **runtime: Any) -> EngineConfig:
    sections = {"compile": {"backend": "eager"}, "lora": {"max_adapters": 3, "max_rank": 4} | lora}
    quantization = runtime.pop("quantization", "auto")
    model = {"path": str(folder), "dtype": "float32", "quantization": quantization}
    return tiny_config(cache, model=model, runtime=runtime, **sections)


def compiled(*args: Any, **runtime: Any) -> LoraProgram:
    found = load_or_compile(config(*args, **runtime), None).artifact.program.lora
    assert found is not None
    return found


@pytest.mark.slow
def test_it_holds_over_ranks(shallow, tmp_path, monkeypatch):
    """An engine of several ranks takes no adapters yet, so the config says that there are some behind its back."""
    section = LoraSection(max_adapters=3, max_rank=4)
    monkeypatch.setattr(resolve, "_lora", lambda *_: section)
    layout = compiled(shallow, tmp_path, {}, tensor_parallel_size=2).layout
    cut = {target.weight.split(".")[-2] for target in layout.targets if target.input_ranges}
    assert cut == {"o_proj", "down_proj"}
    assert all(target.output_ranges or target.input_ranges for target in layout.targets)


@pytest.mark.slow
def test_it_holds_over_weights_in_few_bits(shallow, tmp_path):
    lora = compiled(shallow, tmp_path, {"targets": ["q_proj", "v_proj", "down_proj"]}, quantization="fp8")
    assert {target.weight.split(".")[-2] for target in lora.layout.targets} == {"q_proj", "v_proj", "down_proj"}
    assert lora.program.quantised_weights


def test_adapters_that_requests_would_not_get_are_refused(shallow, tmp_path, monkeypatch):
    write = AdapterCase.write

    def swapped(case: AdapterCase, pool: Any) -> None:
        write(case, pool)
        for buffer in pool.buffers.values():
            buffer[0], buffer[2] = buffer[2].clone(), buffer[0].clone()

    monkeypatch.setattr(AdapterCase, "write", swapped)
    with pytest.raises(UnsupportedModelError, match=r"adapters of '\w+' would not be served right: .* Leave out the"):
        compiled(shallow, tmp_path, {})


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "wq"], "lora.targets has 'wq', which no linear of this model is called"),
        (["all-linear", "norm"], "lora.targets has 'norm', which no linear"),
    ],
)
def test_targets_that_are_not_served_are_refused_by_name(shallow, tmp_path, targets, message):
    with pytest.raises(ConfigError, match=message):
        compiled(shallow, tmp_path, {"targets": targets})
