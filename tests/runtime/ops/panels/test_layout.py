"""Panels: where a weight's numbers lie, and back."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.ops.panels import layout
from mllm_compile.runtime.ops.panels.layout import in_rows, put_in_panels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
def test_rows_come_back(dtype, monkeypatch):
    monkeypatch.setattr(layout, "_MOST_WORDS", 100)  # a panel at a time
    weight = torch.arange(48 * 24).view(48, 24).to(dtype)
    panels = weight.clone()
    put_in_panels(panels, 4)
    assert not torch.equal(panels, weight)
    assert torch.equal(in_rows(panels, 4), weight)


def test_units_of_sixteen_rows_follow_each_other():
    panels = torch.arange(32 * 8, dtype=torch.int16).view(32, 8).to(torch.bfloat16)
    scales = panels.clone()
    put_in_panels(panels, 4)
    assert panels.flatten()[:6].tolist() == [0, 1, 8, 9, 16, 17]
    put_in_panels(scales, 2)
    assert scales.flatten()[:3].tolist() == [0, 8, 16]
