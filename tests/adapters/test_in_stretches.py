"""mllm_compile/adapters/in_stretches.py: the same numbers, by operations that torch does not divide among threads."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_compile.adapters.in_stretches import copy_in_stretches, times

GRAIN = 32768  # numbers of more than which torch's loops wake other threads


class Largest(TorchDispatchMode):
    """The most numbers that one operation computes; views and new memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mul", "copy_", "_to_copy"):
            self.count = max(self.count, out.numel())
        return out


@pytest.mark.parametrize("scale", [2.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_are_multiplied_and_copied_as_whole_ones_are_but_in_short_stretches(dtype, scale):
    matrix = torch.randn(5000, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = matrix * scale if dtype == torch.bfloat16 else (matrix.float() * scale).bfloat16()
    place = torch.empty(80_000, dtype=torch.bfloat16)[: exact.numel()].view(exact.shape)
    with Largest() as largest:
        ours = times(matrix, scale, torch.bfloat16)
        copy_in_stretches(ours, place)
    assert torch.equal(ours, exact) and torch.equal(place, exact)
    assert 0 < largest.count <= GRAIN
