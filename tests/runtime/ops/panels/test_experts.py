"""The CPU's linears of experts in C++: against float64, and a row's outputs whatever else is in the step."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.config.resolution.device import has_panels
from mllm_compile.runtime.ops.panels.expert_ops import (
    integer_panel_expert_linear_reference,
    rounded_panel_expert_linear_reference,
)
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, third_role
from tests.runtime.ops.panels.library import load_panel_linears
from tests.runtime.ops.panels.test_linears import SCHEMES, error, in_panels, numbers

pytestmark = pytest.mark.skipif(not has_panels("cpu"), reason="the linears are for AVX2 and AVX-512")

EXPERTS, CHOSEN, ROWS, COLUMNS = 5, 2, 48, 576
TOKENS = (1, 2, 7, 90)  # the last has so many rows that weights become floats
REFERENCES = {
    "integer_panel_expert_linear": integer_panel_expert_linear_reference,
    "rounded_panel_expert_linear": rounded_panel_expert_linear_reference,
}


@pytest.fixture(autouse=True, scope="module")
def library():
    load_panel_linears()


def experts(scheme):
    """The tensors in panels, and the weights that they stand for."""
    tensors = quantised(numbers(EXPERTS, ROWS, COLUMNS, seed=1) * 0.02, scheme)
    third = tensors.get(third_role(scheme.kind))
    weight = dequantised(tensors, scheme.kind, scheme.group, COLUMNS, torch.float32)
    panels = [in_panels(tensors[VALUES]), in_panels(tensors[SCALES], tensors[SCALES].itemsize)]
    return (*panels, None if third is None else in_panels(third, third.itemsize)), weight


def choices(tokens, dtype=torch.int64):
    """Experts of each token; the last expert is chosen by none."""
    scores = torch.rand(tokens, EXPERTS - 1, generator=torch.Generator().manual_seed(tokens))
    return scores.topk(CHOSEN).indices.to(dtype)


def right(x, ids, weight, bias):
    rows = [
        x[token if len(x) == len(ids) else token * CHOSEN + place].double() @ weight[expert].double().T
        + bias[expert].double()
        for token, of_token in enumerate(ids.tolist())
        for place, expert in enumerate(of_token)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("op", REFERENCES)
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_multiplied_by_their_experts(name, op):
    scheme = SCHEMES[name]
    tensors, weight = experts(scheme)
    is_exact = op.startswith("integer")
    for tokens in TOKENS:
        for of_tokens, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            ids = choices(tokens, torch.int64 if of_tokens else torch.int32)
            x = numbers(tokens * (1 if of_tokens else CHOSEN), COLUMNS, dtype=dtype)
            bias = numbers(EXPERTS, ROWS, dtype=dtype, seed=2)
            operands = x, ids, *tensors, bias, scheme.group, of_tokens
            found = getattr(torch.ops.mllm, op)(*operands)
            assert found.dtype == dtype
            of_type = 2e-6 if dtype == torch.float32 else 5e-3
            assert error(found, right(x, ids, weight, bias)) < (of_type if is_exact else 2e-2)
            assert error(found, REFERENCES[op](*operands).double()) < max(of_type, 0 if is_exact else 3e-4)


@pytest.mark.parametrize("op", REFERENCES)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_gives_the_same_bits_however_many_rows_its_expert_has(name, op):
    scheme = SCHEMES[name]
    tensors, _ = experts(scheme)
    for tokens in TOKENS[1:]:
        x, ids = numbers(tokens, COLUMNS), choices(tokens)
        others = ids.clone()
        others[1:] = ids[0]  # all choose as the first token does
        found, together = (
            getattr(torch.ops.mllm, op)(x, chosen, *tensors, None, scheme.group, True) for chosen in (ids, others)
        )
        assert torch.equal(found[:CHOSEN], together[:CHOSEN]), tokens


def test_threads_change_nothing():
    scheme = SCHEMES["int4 with offsets"]
    tensors, _ = experts(scheme)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            operands = numbers(400, COLUMNS), choices(400), *tensors, None, scheme.group, True
            found.append(torch.ops.mllm.integer_panel_expert_linear(*operands))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("op", REFERENCES)
@pytest.mark.parametrize("expert", [-1, EXPERTS])
def test_an_expert_that_is_not_there_is_an_error(expert, op):
    scheme = SCHEMES["int8 of Q8_0"]
    tensors, _ = experts(scheme)
    ids = torch.tensor([[0, expert]])
    with pytest.raises(RuntimeError, match=f"a router chose expert {expert} of {EXPERTS}"):
        getattr(torch.ops.mllm, op)(numbers(1, COLUMNS), ids, *tensors, None, scheme.group, True)


def test_a_step_without_tokens_has_no_rows():
    scheme = SCHEMES["int8 of Q8_0"]
    tensors, _ = experts(scheme)
    for op in REFERENCES:
        operands = numbers(0, COLUMNS), torch.empty(0, CHOSEN, dtype=torch.int64), *tensors, None, scheme.group, True
        assert getattr(torch.ops.mllm, op)(*operands).shape == (0, ROWS)
