"""dequantised_integers: the numbers that scheme and zero points say, on a GPU."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.ops import op
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import WeightScheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("shape", [(7, 384), (640, 4096), (24576, 4096)])
def test_they_are_the_references(shape, has_zeros, dtype):
    scheme = WeightScheme("int4_lanes", 128, torch.float16 if has_zeros else torch.bfloat16, has_zeros)
    generator = torch.Generator("cuda").manual_seed(0)
    made = quantised(torch.randn(shape, device="cuda", generator=generator), scheme)
    ours = op("dequantised_integers")(made["values"], made["scales"], made.get("zeros"), dtype)
    assert torch.equal(ours, dequantised(made, scheme.kind, 128, shape[1], dtype))
