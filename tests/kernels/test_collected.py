"""FlashInfer's kernels are loaded for all layers that attend: to a request's own tokens, and to its source."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import DeviceError
from mllm_compile.kernels import flashinfer
from mllm_compile.kernels.decode_attention import add_decode_attention
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import Program
from tests.config.resolving import H200, resolved
from tests.runtime.attention.torch_flashinfer import Library, library

__all__ = ["library"]
OWN = LayerSpec("layers.0.self_attn", 0, 4, 4, 64, 64, 0.125, 0.0, -1, None)
CROSS = replace(OWN, name="layers.0.encoder_attn")
PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


WINDOW = replace(OWN, name="layers.1.self_attn", layer_id=1, window_left=127)


@dataclass
class Spec:
    """A kernel, as FlashInfer describes it."""

    name: str
    is_compiled: bool


@dataclass
class Jit:
    """FlashInfer's compiler: which kernels are prebuilt, and which were built together."""

    prebuilt: Container[str] = ()
    fails: bool = False
    built: list[list[str]] = field(default_factory=list)

    def gen_batch_prefill_module(self, kernel: str, q, kv, out, index, width, of_values, rotation, *features) -> Spec:
        assert (q, kv, out, index) == (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
        assert (width, of_values, rotation, features[1:]) == (64, 64, 0, (False, False))
        name = kernel + "_window" * features[0]
        return Spec(name, name in self.prebuilt)

    def build_jit_specs(self, specs: list[Spec]) -> None:
        self.built.append([spec.name for spec in specs])
        if self.fails:
            raise RuntimeError("no nvcc")


@pytest.fixture(autouse=True)
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    jit = Jit()
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    for name, loads in (("page", "get_page_module"), ("sampling", "get_sampling_module")):
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", SimpleNamespace(**{loads: lambda: None}))
    return jit


def loaded(*layers: LayerSpec) -> list[str]:
    """The lines that are told while the kernels of a program with these layers are loaded."""
    config = on_cpu(resolved(H200, runtime={"without": ["split_decode"], "max_running_requests": 8}))
    reporter = Told()
    flashinfer._load_kernels(config, Program(steps=(), layers=layers, weights=(), output="logits"), reporter)
    return reporter.lines


class Told(NullReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def announce(self, text: str) -> None:
        self.lines.append(text)


def test_kernels_that_are_missing_are_built_at_once_and_told(library: Library, jit: Jit) -> None:
    jit.prebuilt = ("fa2",)
    (line,) = loaded(WINDOW, OWN)
    assert jit.built == [["fa2_window", "fa3"]]
    assert "fa2 of heads of 64 with a window, fa3 of heads of 64: nvcc builds it now" in line


def test_prebuilt_kernels_are_loaded_without_a_word(library: Library, jit: Jit) -> None:
    jit.prebuilt = ("fa2", "fa3", "fa2_window")
    assert loaded(WINDOW, OWN) == [] == jit.built


def test_a_user_who_forbids_builds_is_left_to_flashinfer(library: Library, jit: Jit, monkeypatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert loaded(OWN) == [] == jit.built


def test_a_build_that_fails_is_told_by_what_loads_the_kernel(library: Library, jit: Jit) -> None:
    jit.fails = library.fails = True
    with pytest.raises(DeviceError, match=r"FlashInfer has no kernel for .* no kernel could be built"):
        loaded(OWN)


@pytest.mark.parametrize("without", [(), ("split_decode",)], ids=["own decodes", "FlashInfer's"])
def test_layers_that_attend_to_sources_have_decodes_alone_and_the_decoders_prompts_no_fa3(
    library: Library, jit: Jit, without: tuple[str, ...]
) -> None:
    jit.prebuilt = ("fa2",)
    config = resolved(H200, runtime={"without": list(without), "max_running_requests": 8})
    config = on_cpu(config)
    program = Program(steps=(), layers=(OWN,), cross_layers=(CROSS,), weights=(), output="logits")
    program, _ = add_decode_attention(config, program)
    assert bool(program.kernels_of_layer(CROSS.name).decode) is not bool(without)
    flashinfer._load_kernels(config, program, NullReporter())
    asked = [name for name, _ in library.asked]
    assert asked.count(DECODE) == (2 if without else 0)
    of_sources = asked[asked.index(DECODE, 1) :] if without else []
    assert PREFILL in asked and PREFILL not in of_sources
    assert not jit.built and {options["backend"] for name, options in library.asked if name == PREFILL} == {"fa2"}


def on_cpu(config: ResolvedConfig) -> ResolvedConfig:
    return config.model_copy(update={"runtime": replace(config.runtime, device="cpu")})
