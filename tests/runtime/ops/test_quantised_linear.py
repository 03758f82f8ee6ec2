"""The op of a quantised weight against float32, and what torch.library wants of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mllm_compile.runtime.ops import op
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import WeightScheme

SCHEMES = {
    "fp8 rows": WeightScheme("fp8", 200),
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4", 128, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4", 64, torch.float16, has_zeros=True),
}


def operands(name: str, dtype: torch.dtype, bias: bool = True) -> tuple:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    x, weight, added = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 200), (24, 200), (24,)))
    tensors = quantised(weight, scheme)
    added = added.to(dtype) if bias else None
    return x.to(dtype), tensors["values"], tensors["scales"], tensors.get("zeros"), added, scheme.kind, scheme.group


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_as_near_to_float32_as_torch_is(name, dtype, bias):
    x, values, scales, zeros, added, kind, group = args = operands(name, dtype, bias)
    weight = dequantised({"values": values, "scales": scales, "zeros": zeros}, kind, group, 200, torch.float32)
    exact = functional.linear(x.double(), weight.double(), None if added is None else added.double())
    theirs = functional.linear(x, weight.to(dtype), added)
    ours = op("quantised_linear")(*args)
    assert ours.shape == (2, 3, 24) and ours.dtype == dtype
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_finds_nothing_wrong_with_it(name):
    utils = (
        ("test_faketensor",) if name.startswith("fp8") else ("test_schema", "test_faketensor")
    )  # it multiplies inputs
    torch.library.opcheck(op("quantised_linear"), operands(name, torch.float32), test_utils=utils)
