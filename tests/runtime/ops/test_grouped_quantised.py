"""The Triton kernel of experts in few bits against the reference, through Triton's interpreter, on a CPU.

The interpreter knows no bfloat16: float16 and float32 go another way from bits to numbers. tests/gpu/
test_quantised_experts.py runs all three as a GPU does.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from mllm_compile.runtime.ops.experts.linear import expert_linear_reference
from mllm_compile.runtime.ops.experts.shapes import ONE_ROW
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, WeightScheme
from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter

EXPERTS, CHOSEN, INPUTS, OUTPUTS = 5, 2, 320, 48
SCHEMES = {
    "fp8 rows": WeightScheme("fp8", INPUTS),
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4", 128, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4", 64, torch.float16, has_zeros=True),
    "mxfp4": MXFP4,
}


@starts_the_interpreter
def test_the_kernel_computes_what_the_reference_does_through_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture
def grouped(monkeypatch):
    """The op's function, its kernel launched as it is: torch's wrapper takes compiled ones alone."""
    from mllm_compile.runtime.ops.experts import grouped_quantised

    monkeypatch.setattr(grouped_quantised, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(grouped_quantised, "starts_early", lambda: False)
    monkeypatch.setattr(grouped_quantised, "most_shared_bytes", lambda: 227 << 10)
    return grouped_quantised.quantised_grouped_linear


def order_of(ids: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    order, blocks = [], []
    for expert in range(EXPERTS):
        for rows in (ids.flatten() == expert).nonzero()[:, 0].split(block):
            if len(rows):
                order.append(torch.cat((rows, rows.new_zeros(block - len(rows)))))
                blocks.append([expert, len(rows)])
    return torch.cat(order).int(), torch.tensor(blocks, dtype=torch.int32)


@interpreted
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("tokens", "block"), [(1, ONE_ROW), (9, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_multiplied_by_their_experts_weights(grouped, name, dtype, tokens, block, is_gated):
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = quantised(random(EXPERTS, OUTPUTS, INPUTS) * INPUTS**-0.5, scheme)
    weight = dequantised(tensors, scheme.kind, scheme.group, INPUTS, torch.float32)
    x, bias = random(tokens, INPUTS).to(dtype), random(EXPERTS, OUTPUTS).to(dtype)
    ids = random(tokens, EXPERTS).topk(CHOSEN).indices
    order, blocks = (ids, None) if block == ONE_ROW else order_of(ids, block)
    how = (scheme.kind, scheme.group, CHOSEN, True, is_gated, block)
    ours = grouped(x, order, blocks, tensors["values"], tensors["scales"], tensors.get("zeros"), bias, *how)
    exact = expert_linear_reference(x.float(), ids, weight, bias.float(), False, True)
    rounded = expert_linear_reference(x, ids, weight.to(dtype), bias, False, True)
    if is_gated:
        exact, rounded = (silu(one.chunk(2, -1)[0]) * one.chunk(2, -1)[1] for one in (exact, rounded))
    error, limit = ((one.float() - exact).norm() for one in (ours, rounded))
    assert error <= 1.2 * limit + 1e-5 * exact.norm()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_in_mxfp4_are_dequantised_bit_for_bit(monkeypatch, dtype):
    from mllm_compile.runtime.ops.experts import dequantise

    monkeypatch.setattr(dequantise, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(dequantise, "starts_early", lambda: False)
    tensors = quantised(torch.randn(EXPERTS, OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)), MXFP4)
    assert len(tensors["values"].unique()) == 256
    ours = dequantise.dequantised_experts(tensors["values"], tensors["scales"], dtype)
    assert torch.equal(ours, dequantised(tensors, "mxfp4", 32, INPUTS, dtype))


@interpreted
def test_constants_can_be_written_into_a_string_of_a_pieces_source():
    from mllm_compile.runtime.ops.experts import grouped_quantised

    values = [getattr(one, "value", None) for name, one in vars(grouped_quantised).items() if name.startswith("_FROM_")]
    assert len(values) == 4
    assert not any(set(value) & set("\n\"'\\") for value in values)
