"""check/spread.py: rows that cancel move far with the rounding of what modules give, others as little as that."""

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


def test_what_a_later_module_gives_is_rounded_otherwise_too():
    """A row whose embedding is exact may cancel further on."""

    class Doubled(Differences):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding.from_pretrained(torch.tensor([[0.0, 0.0]]))
            self.later = torch.nn.Linear(2, 2, bias=True)
            self.later.requires_grad_(False)
            self.later.bias.copy_(torch.tensor([1.0, 0.99]))

        def forward(self) -> torch.Tensor:
            return self.later(self.embedding(torch.arange(1))) @ torch.tensor([[1.0], [-1.0]])

    model = Doubled()
    (moved,) = spread_of_rows(model, model, model(), torch.bfloat16) / 2**-7
    assert 32 < moved < 205
