"""Errors that the self-check of images finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.check import media

EXACT = torch.eye(4)
OF_TRANSFORMERS_IN_16_BITS = EXACT * 1.3  # its own rounding


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model in bfloat16 that is further from float32 than the limit."""

    def logits(model: torch.nn.Module, *_: object) -> torch.Tensor:
        return EXACT if next(model.parameters()).dtype == torch.float32 else OF_TRANSFORMERS_IN_16_BITS

    monkeypatch.setattr(media, "logits_of_transformers", logits)
    return SimpleNamespace(model=torch.nn.Linear(2, 2, dtype=torch.bfloat16))


def fault(model: Any, ours: torch.Tensor) -> str | None:
    nothing: Any = None
    case: Any = SimpleNamespace(facts=SimpleNamespace(noun="image"))
    return media.compare_media(model, nothing, case, ours, 0.16, "", nothing)


def test_in_16_bits_logits_of_float32_are_right_where_transformers_rounds_more(model):
    assert fault(model, (EXACT * 1.02).bfloat16()) is None
    assert next(model.model.parameters()).dtype == torch.bfloat16


def test_logits_that_are_far_from_both_are_refused(model):
    assert "its logits are off by 0.7 from Transformers'" in (fault(model, (EXACT * 1.7).bfloat16()) or "")


def test_in_float32_transformers_alone_counts(model):
    model.model.float()
    assert "its logits are off by 0.3" in (fault(model, OF_TRANSFORMERS_IN_16_BITS) or "")
