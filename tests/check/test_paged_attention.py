"""The check of attention in C++: the right library passes, wrong ones are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mllm_compile.check.paged_attention import check_paged_attention
from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import LayerKernels
from mllm_compile.runtime.attention.paged.attend import PagedLayer
from mllm_compile.runtime.attention.paged.library import PAGED_ATTENTION
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program
from tests.runtime.attention.cpu_library import paged_binary

LAYER = LayerSpec("layers.0.attn", 0, 4, 2, 16, 16, 0.3, 0.0, -1, None)
IN_CHUNKS = replace(LAYER, chunk=64, alibi_slopes=(0.5, 0.25, 0.1, 0.01))
LAYERS = {"plain": LAYER, "sinks and window": replace(LAYER, sinks="sinks", window_left=66), "chunks": IN_CHUNKS}


def check(layer: LayerSpec, dtype: torch.dtype) -> None:
    program = Program((), (layer,), (), "logits", layer_kernels={layer.name: LayerKernels(paged=PAGED_ATTENTION)})
    linked = link(program, {}, {PAGED_ATTENTION.name: paged_binary()}, torch.device("cpu"))
    check_paged_attention(linked, Served(16, dtype, dtype, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_right_library_passes(layer, dtype):
    check(layer, dtype)


def _without_new_keys(run, self, inputs, *rest):
    run(self, replace(inputs, slots=None), *rest)


def _scaled(run, self, inputs, *rest):
    run(self, replace(inputs, q=inputs.q * 1.1), *rest)


def _no_numbers(run, self, inputs, *rest):
    run(self, inputs, *rest)
    inputs.out[-1] = torch.nan


@pytest.mark.parametrize("wrong", [_without_new_keys, _scaled, _no_numbers])
def test_a_wrong_one_is_told(wrong, monkeypatch):
    run = PagedLayer.run
    monkeypatch.setattr(PagedLayer, "run", lambda *args: wrong(run, *args))
    with pytest.raises(CompileError, match=r"attention of layers\.0\.attn is off by .*without: \[paged_attention\]"):
        check(LAYER, torch.float32)
