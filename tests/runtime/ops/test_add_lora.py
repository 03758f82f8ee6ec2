"""mllm.add_lora on a CPU: each token has what its own adapter adds, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.ops.experts.shapes import ELSEWHERE
from mllm_compile.runtime.ops.lora.reference import (
    add_lora_of_experts_on_cpu,
    add_lora_of_experts_reference,
    add_lora_of_ids,
    add_lora_on_cpu,
    add_lora_reference,
    scale_of_adapters,
)

STARTS, ROWS, INPUTS, OUTPUTS, RANK = [0, 24], [16, 8], 20, 32, 4


def operands(tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (1, tokens, OUTPUTS), (1, tokens, INPUTS), (3, 2 * RANK, INPUTS), (3, sum(ROWS), RANK)
    y, x, a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    slots = torch.randint(-1, 3, (tokens,), generator=generator, dtype=torch.int32)
    return y, x, a, b, slots


def by_token(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    out = y.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        out[0, token, :16] += b[slot, :16] @ (a[slot, :RANK] @ x[0, token])
        out[0, token, 24:] += b[slot, 16:] @ (a[slot, RANK:] @ x[0, token])
    return out


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("op", [add_lora_on_cpu, add_lora_reference, torch.ops.mllm.add_lora])
def test_each_token_has_its_own_adapter(op, tokens):
    given = operands(tokens)
    assert torch.allclose(op(*given, STARTS, ROWS), by_token(*given), atol=1e-5)


def test_a_token_without_an_adapter_keeps_its_numbers_whatever_the_others_hold():
    y, x, a, b, slots = operands(7)
    slots[:] = torch.tensor([0, -1, 1, -1, 0, 1, -1])
    a[2], b[2] = torch.nan, torch.inf  # a slot that no token has
    x[0, 0] = torch.nan
    found = torch.ops.mllm.add_lora(y, x, a, b, slots, STARTS, ROWS)
    assert torch.equal(found[0, slots < 0], y[0, slots < 0])
    assert found[0, 2].isfinite().all()


@pytest.mark.parametrize("op", [add_lora_of_ids, torch.ops.mllm.add_lora_of_ids])
def test_each_id_has_the_row_of_its_token_s_adapter(op):
    generator = torch.Generator().manual_seed(3)
    y, a, b = (torch.randn(shape, generator=generator) for shape in ((1, 5, 6), (2, 9, RANK), (2, 6, RANK)))
    ids, slots = torch.tensor([[8, 0, 3, 3, 8]]), torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32)
    expected = y.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, token] += b[slot] @ a[slot, ids[0, token]]
    found = op(y, ids, a, b, slots)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found[0, 1], y[0, 1])


@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize(
    "op", [add_lora_of_experts_on_cpu, add_lora_of_experts_reference, torch.ops.mllm.add_lora_of_experts]
)
def test_each_row_has_its_adapter_s_factors_of_its_expert(op, of_tokens):
    generator = torch.Generator().manual_seed(4)
    shapes = (12, 6), (6 if of_tokens else 12, 5), (2, 3, RANK, 5), (2, 3, 6, RANK)
    y, x, a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [ELSEWHERE, 1], [0, 1], [2, 0]])
    slots = torch.tensor([1, -1, 0, 1, 0, 1], dtype=torch.int32)
    expected = y.clone()
    for row, expert in enumerate(ids.flatten().tolist()):
        slot = int(slots[row // 2])
        if slot >= 0 and expert >= 0:
            expected[row] += b[slot, expert] @ a[slot, expert] @ x[row // 2 if of_tokens else row]
    found = op(y, x, a, b, slots, ids, of_tokens)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found[2:4], y[2:4])
    assert torch.equal(found[6], y[6])


@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_but_for_the_bias_are_scaled_and_stay_bitwise_without_an_adapter(has_bias):
    generator = torch.Generator().manual_seed(5)
    y, scales, bias = (torch.randn(shape, generator=generator) for shape in ((1, 4, 6), (2, 6), (6,)))
    slots = torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    found = scale_of_adapters(y, scales, bias if has_bias else None, slots)
    own = bias if has_bias else torch.zeros(6)
    assert torch.equal(found[0, 1], y[0, 1])
    for token, slot in ((0, 1), (2, 0), (3, 1)):
        assert torch.allclose(found[0, token], (y[0, token] - own) * scales[slot] + own, atol=1e-6)
