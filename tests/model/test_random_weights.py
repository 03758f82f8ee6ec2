"""Random weights for checks: few values, and an object for each name of the model."""

from __future__ import annotations

import torch

from mllm_compile.model.hf_model import HFModel, fake_copy
from mllm_compile.model.random_weights import materialise


def test_buffers_with_the_same_values_are_no_tie() -> None:
    """A later trace would read all of them as the first: it tells weights by identity."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8))
    hf_model = HFModel(model, {}, frozenset())  # type: ignore[arg-type]
    fake_copy(model, FakeTensorMode(allow_non_fake_inputs=True), "cpu")
    made = materialise(hf_model, "cpu")
    assert made["0.running_mean"].data_ptr() == made["1.running_var"].data_ptr()
    names = fake_copy(model, FakeTensorMode(allow_non_fake_inputs=True), "cpu")
    assert sorted(names.values()) == sorted(dict(model.state_dict(keep_vars=True)))
