"""The norm ahead of linears of deterministic steps: its numbers, and its bits among any number of rows."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.ops import op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("columns", [1024, 4096, 5120])
def test_a_row_has_the_numbers_of_float32_and_the_same_bits_among_any_others(columns):
    torch.manual_seed(0)
    x, residual = torch.randn(2, 300, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(columns, device="cuda", dtype=torch.bfloat16)
    summed, normed = op("add_rms_norm")(x, residual, weight, 1e-6)
    assert torch.equal(summed, x + residual)
    wide = summed.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    assert (normed.float() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert torch.equal(op("rms_norm")(summed, weight, 1e-6), normed)
    for rows in (slice(1), slice(7, 15), slice(100, 164)):
        ours = op("add_rms_norm")(x[rows], residual[rows], weight, 1e-6)
        assert all(torch.equal(one, whole[rows]) for one, whole in zip(ours, (summed, normed), strict=True))
