"""The type and the form in which weights are kept and computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.quantisation import Scheme
from mllm_compile.config.resolution.device import DeviceInfo
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError
from tests.config.resolving import A100, CPU, H200, QWEN, resolved

QUANTISED = Scheme("fp8 in blocks of 128 x 128", ("fp8",), kinds=("fp8",))
NOT_IN_LINEARS = Scheme("bitsandbytes nf4", ("bitsandbytes nf4",))


def quantization(asked: str, scheme: Scheme | None, *disabled: str) -> ResolvedConfig:
    model = {"path": "m", "quantization": asked}
    config = EngineConfig.from_dict({"model": model, "compile": {"disable_passes": list(disabled)}})
    return resolve(config, ModelFolder(Path("/models/m"), QWEN, (), scheme), H200)


INT4 = Scheme("awq in 4 bits, groups of 128", ("awq",), kinds=("int4",))


@pytest.mark.parametrize(
    ("device", "scheme", "asked", "becomes"),
    [
        (H200, INT4, {}, "bfloat16"),
        (H200, INT4, {"dtype": "float16"}, "float16"),
        (H200, INT4, {"quantization": "dequantize"}, "float16"),
        (H200, NOT_IN_LINEARS, {}, "float16"),
        (A100, INT4, {}, "float16"),
        (CPU, INT4, {}, "float32"),
    ],
)
def test_four_bit_weights_of_a_float16_checkpoint_are_served_in_the_type_that_their_kernels_take(
    device, scheme, asked, becomes
):
    folder = ModelFolder(Path("/models/m"), {**QWEN, "dtype": "float16"}, (), scheme)
    assert resolve(EngineConfig.from_dict({"model": {"path": "m", **asked}}), folder, device).model.dtype == becomes


CACHE_ALONE = Scheme("scales of a KV cache", ())


@pytest.mark.parametrize(
    ("asked", "scheme", "disabled", "becomes"),
    [
        ("auto", None, (), "none"),
        ("auto", QUANTISED, (), "keep"),
        ("auto", QUANTISED, ("quantise_linears",), "dequantize"),
        ("auto", NOT_IN_LINEARS, (), "dequantize"),
        ("none", None, (), "none"),
        ("dequantize", None, (), "none"),
        ("dequantize", QUANTISED, (), "dequantize"),
        ("fp8", None, (), "fp8"),
        ("fp8", QUANTISED, (), "keep"),
        ("int4", None, (), "int4"),
        ("auto", CACHE_ALONE, (), "none"),
        ("none", CACHE_ALONE, (), "none"),
        ("fp8", CACHE_ALONE, (), "fp8"),
    ],
)
def test_weights_are_kept_as_the_checkpoint_has_them_or_as_is_asked(asked, scheme, disabled, becomes):
    config = quantization(asked, scheme, *disabled)
    assert config.model.quantization == becomes
    again = resolve(config.as_config(), ModelFolder(Path("/models/m"), QWEN, (), scheme), H200)
    assert again.model.quantization == becomes


GGUF = Scheme("gguf Q4_1", ("gguf q4_1",), kinds=("int4", "int8"), is_for_cpus=True)


@pytest.mark.parametrize(
    ("device", "sections", "vectors", "becomes", "why"),
    [
        (CPU, {}, True, "keep", "the checkpoint's"),
        (CPU, {"model": {"dtype": "bfloat16"}}, True, "dequantize", "a CPU is faster in bfloat16"),
        (CPU, {}, False, "dequantize", "AVX2"),
        (CPU, {"compile": {"backend": "eager"}}, True, "dequantize", "eager"),
        (CPU, {"compile": {"disable_passes": ["pack_linears"]}}, True, "dequantize", "names pack_linears"),
        (H200, {}, False, "dequantize", "AVX2"),
    ],
)
def test_linears_compute_from_blocks_of_gguf_on_a_cpu(device, sections, vectors, becomes, why, monkeypatch):
    monkeypatch.setattr("mllm_compile.config.resolution.quantisation.has_panels", lambda device: vectors)
    monkeypatch.setattr("mllm_compile.config.resolution.resolve.has_amx", lambda device: False)
    found = resolved_of(GGUF, device, **sections)
    assert found.model.quantization == becomes
    assert why in next(choice.why for choice in found.choices if choice.key == "model.quantization")
    for asked in ("keep", "keep_a8"):
        by_name = {**sections, "model": {**sections.get("model", {}), "quantization": asked}}
        if becomes == "keep" or "bfloat16" in why:
            assert resolved_of(GGUF, device, **by_name).model.quantization == asked
        else:
            with pytest.raises(ConfigError, match=rf"quantization is {asked}, but .*{why}.*Set it to auto"):
                resolved_of(GGUF, device, **by_name)


@pytest.mark.parametrize(
    ("scheme", "asked", "device", "message"),
    [
        (None, "keep", CPU, "the checkpoint is not quantised. Set it to auto, or to int8 or int4"),
        (CACHE_ALONE, "keep_a8", CPU, "the checkpoint is not quantised"),
        (NOT_IN_LINEARS, "keep", H200, "linears do not compute with"),
        (QUANTISED, "keep_a8", CPU, "linears do not multiply .* with inputs of eight bits"),
        (INT4, "keep_a8", H200, "AVX2"),
    ],
)
def test_what_cannot_be_kept_is_refused(scheme, asked, device, message):
    with pytest.raises(ConfigError, match=message):
        resolved_of(scheme, device, model={"quantization": asked})


def test_a_cpu_without_float32_dequantises_integers_unless_it_is_asked_to_keep_them(monkeypatch):
    monkeypatch.setattr("mllm_compile.config.resolution.quantisation.has_panels", lambda device: True)
    for asked, becomes in (("auto", "dequantize"), ("keep", "keep"), ("keep_a8", "keep_a8")):
        found = resolved_of(INT4, CPU, model={"dtype": "bfloat16", "quantization": asked})
        assert found.model.quantization == becomes
        again = resolve(found.as_config(), ModelFolder(Path("/models/m"), QWEN, (), INT4), CPU)
        assert again.model.quantization == becomes
    assert resolved_of(INT4, CPU, model={"dtype": "float32"}).model.quantization == "keep"


def resolved_of(scheme: Scheme | None, device: DeviceInfo, **sections: dict[str, Any]) -> ResolvedConfig:
    config = EngineConfig.from_dict({**sections, "model": {"path": "m", **sections.get("model", {})}})
    return resolve(config, ModelFolder(Path("/models/m"), QWEN, (), scheme), device)


def test_int8_is_for_cpus():
    assert resolved(CPU, model={"path": "m", "quantization": "int8"}).model.quantization == "int8"
    with pytest.raises(ConfigError, match=r"is int8, which is for CPUs\. Set it to fp8"):
        resolved(H200, model={"path": "m", "quantization": "int8"})


@pytest.mark.parametrize(("amx", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_computes_in_what_it_is_fast_in_and_says_so(amx, dtype, monkeypatch):
    monkeypatch.setattr("mllm_compile.config.resolution.resolve.has_amx", lambda device: amx)
    config = resolved(CPU, model={"path": "m", "quantization": "int8"})
    assert config.model.dtype == dtype
    line = config.line_on_cpu()
    assert line.startswith(f"computing on the CPU in {dtype}: ")
    assert "AMX" in line
    assert line.endswith("; linears from int8, with inputs rounded to eight bits")
    assert resolved(H200).line_on_cpu() is None


MIXED = Scheme("compressed-tensors fp8 and integers", ("compressed-tensors fp8",), kinds=("fp8", "int4"))


@pytest.mark.parametrize(
    ("asked", "scheme"),
    [("fp8", INT4), ("int4", QUANTISED), ("fp8", NOT_IN_LINEARS), ("fp8", MIXED), ("int4", MIXED)],
)
def test_weights_that_are_quantised_in_another_way_are_not_quantised_again(asked, scheme):
    with pytest.raises(ConfigError, match=f"is {asked}, but the checkpoint is quantised already .*Set it to auto"):
        quantization(asked, scheme)
    assert quantization("auto", scheme).model.quantization in ("keep", "dequantize")
