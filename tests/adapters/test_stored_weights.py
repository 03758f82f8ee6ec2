"""Weights that adapters have copies of, as an update made them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.adapters.stored_weights import StoredWeights
from mllm_compile.errors import EnginePausedError
from mllm_compile.runtime.lora.target import LoraTarget
from mllm_compile.runtime.weights.spec import WeightSpec


def test_what_was_updated_is_not_read_while_it_sleeps():
    values, awake = torch.arange(8.0).view(4, 2), [True]
    live: Any = SimpleNamespace(written={"w"}, rows=lambda name, start, rows: values.narrow(0, start, rows))
    spec, target = WeightSpec("w", (4, 2), torch.float32, ()), LoraTarget("w", 4, 2, "w", 0, 0, 4, stored_in="w")
    stored = StoredWeights([[spec]], Path(), {"w": target}, lambda: live, lambda: nullcontext(awake[0]))
    assert torch.equal(stored.read("w", 1, 2), values[1:3])
    awake[0] = False
    with pytest.raises(EnginePausedError, match="Load the adapter again after wake_up"):
        stored.read("w", 1, 2)
