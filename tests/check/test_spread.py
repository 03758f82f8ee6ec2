"""check/spread.py: rows that cancel move far with the rounding of what is embedded, others as little as that."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.check.spread import spread_of_rows


class Differences(torch.nn.Module):
    """Of each row one logit: its first number less its second."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding.from_pretrained(torch.tensor([[1.0, -1.0], [1.0, 0.99], [-1.0, 1.0]]))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self) -> torch.Tensor:
        return self.embedding(torch.arange(3)) @ torch.tensor([[1.0], [-1.0]])


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_a_row_that_cancels_moves_far_and_no_other(dtype, step):
    """By as much as the dtype rounds: a model in float16 may not be off by what bfloat16 moves it."""
    model = Differences()
    logits = model()
    first, cancelled, last = (spread_of_rows(model, model, logits, dtype) / step).tolist()
    assert 0.1 < first <= 1 and 0.1 < last <= 1
    assert 32 < cancelled < 205
    assert torch.equal(model(), logits), "nothing moves it any more"
