"""FlashInfer's kernels are loaded for all layers that attend: to a request's own tokens, and to its source."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.kernels import flashinfer
from mllm_compile.kernels.decode_attention import add_decode_attention
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import Program
from tests.config.resolving import H200, resolved
from tests.runtime.attention.torch_flashinfer import Library, library

__all__ = ["library"]
OWN = LayerSpec("layers.0.self_attn", 0, 4, 4, 64, 64, 0.125, 0.0, -1, None)
CROSS = replace(OWN, name="layers.0.encoder_attn")
PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


@pytest.mark.parametrize("without", [(), ("split_decode",)], ids=["own decodes", "FlashInfer's"])
def test_layers_that_attend_to_sources_have_decodes_alone(
    library: Library, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]
) -> None:
    for name, loads in (("page", "get_page_module"), ("sampling", "get_sampling_module")):
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", SimpleNamespace(**{loads: lambda: None}))
    config = resolved(H200, runtime={"without": list(without), "max_running_requests": 8})
    config = on_cpu(config)
    program = Program(steps=(), layers=(OWN,), cross_layers=(CROSS,), weights=(), output="logits")
    program, _ = add_decode_attention(config, program)
    assert bool(program.kernels_of_layer(CROSS.name).decode) is not bool(without)
    flashinfer._load_kernels(config, program)
    asked = [name for name, _ in library.asked]
    assert asked.count(DECODE) == (2 if without else 0)
    of_sources = asked[asked.index(DECODE, 1) :] if without else []
    assert PREFILL in asked and PREFILL not in of_sources


def on_cpu(config: ResolvedConfig) -> ResolvedConfig:
    return config.model_copy(update={"runtime": replace(config.runtime, device="cpu")})
