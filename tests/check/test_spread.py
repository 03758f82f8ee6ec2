"""check/spread.py: rows that cancel move far with the rounding of what is embedded, others as little as that."""

from __future__ import annotations

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


def test_a_row_that_cancels_moves_far_and_no_other():
    model = Differences()
    logits = model()
    first, cancelled, last = spread_of_rows(model, model, logits).tolist()
    assert 0.001 < first < 0.008 and 0.001 < last < 0.008
    assert 0.25 < cancelled < 1.6
    assert torch.equal(model(), logits), "nothing moves it any more"
