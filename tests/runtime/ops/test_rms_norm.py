"""The Triton kernel of norms ahead of linears against float32, through Triton's interpreter, on a CPU.

One test runs this file with the interpreter (tests/runtime/interpreted.py). tests/gpu/test_rms_norm.py has the compiled
kernel.
"""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.ops.rms_norm_shapes import is_taken, num_warps
from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter

EPS = 1e-5


@starts_the_interpreter
def test_the_kernel_is_a_norm_through_the_interpreter() -> None:
    run_interpreted(__file__)


def test_a_row_has_more_warps_the_longer_it_is_and_stays_in_registers():
    assert [num_warps(columns) for columns in (64, 512, 513, 4096, 5120, 16384)] == [1, 1, 2, 8, 16, 16]
    assert is_taken(16384) and not is_taken(16385) and not is_taken(0)


@interpreted
@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_row_is_normed_with_and_without_a_sum(monkeypatch, columns, plus_one):
    from mllm_compile.runtime.ops import rms_norm

    monkeypatch.setattr(rms_norm, "wrap_triton", lambda kernel: kernel)
    torch.manual_seed(0)
    x, residual = torch.randn(2, 2, 3, columns)  # of bfloat16 the interpreter cuts off bits
    weight = torch.rand(columns)

    def expected(total: torch.Tensor) -> torch.Tensor:
        scaled = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + EPS)
        return (scaled * (weight.float() + plus_one)).to(total.dtype)

    summed, normed = rms_norm._launch(x, residual, weight, EPS, plus_one)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed, expected(x + residual), rtol=1e-5, atol=1e-5)
    same, normed = rms_norm._launch(x, None, weight, EPS, plus_one)
    assert same is x
    torch.testing.assert_close(normed, expected(x), rtol=1e-5, atol=1e-5)
