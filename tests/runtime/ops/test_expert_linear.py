"""runtime/ops/experts/linear.py: the meaning of the op, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import ELSEWHERE

TOKENS, CHOSEN, EXPERTS, INPUTS, OUTPUTS = 7, 2, 5, 6, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_row_is_multiplied_by_the_weight_of_its_expert(dtype, is_transposed, of_tokens, has_bias):
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOSEN).indices
    weight, x = random(EXPERTS, OUTPUTS, INPUTS), random(TOKENS if of_tokens else TOKENS * CHOSEN, INPUTS)
    bias = random(EXPERTS, OUTPUTS) if has_bias else None
    given = weight.transpose(1, 2).contiguous() if is_transposed else weight
    ours = op("expert_linear")(x, ids, given, bias, is_transposed, of_tokens)
    for row in range(TOKENS * CHOSEN):
        token, choice = divmod(row, CHOSEN)
        expert = int(ids[token, choice])
        theirs = x[token if of_tokens else row] @ weight[expert].T
        theirs = theirs if bias is None else theirs + bias[expert]
        torch.testing.assert_close(ours[row], theirs)


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_an_id_of_no_expert_is_an_error_and_no_answer(wrong):
    ids = torch.tensor([[0, wrong]])
    with pytest.raises(IndexError, match=rf"beyond the {EXPERTS} there are: .*{wrong}"):
        op("expert_linear")(torch.ones(1, INPUTS), ids, torch.ones(EXPERTS, OUTPUTS, INPUTS), None, False, True)


@pytest.mark.parametrize("bias", [None, torch.ones(EXPERTS, OUTPUTS)], ids=["plain", "bias"])
def test_rows_of_experts_that_are_elsewhere_are_zeros(bias):
    x, weight = torch.ones(2, INPUTS), torch.ones(EXPERTS, OUTPUTS, INPUTS)
    out = op("expert_linear")(x, torch.tensor([[ELSEWHERE, 1], [0, ELSEWHERE]]), weight, bias, False, True)
    value = INPUTS + (bias is not None)
    assert out[:, 0].tolist() == [0, value, value, 0]


def test_no_token_is_no_row():
    ids = torch.empty(0, CHOSEN, dtype=torch.int64)
    out = op("expert_linear")(torch.ones(0, INPUTS), ids, torch.ones(EXPERTS, OUTPUTS, INPUTS), None, False, True)
    assert out.shape == (0, OUTPUTS)


def test_the_op_has_the_schema_and_the_fake_that_compilers_need():
    ids = torch.tensor([[0, 3], [1, 2]])
    args = (torch.ones(2, INPUTS), ids, torch.ones(EXPERTS, OUTPUTS, INPUTS), None, False, True)
    torch.library.opcheck(op("expert_linear"), args, test_utils=("test_schema", "test_faketensor"))
