"""multiply_patches: which convolutions it takes, and that numbers stay as they are."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from mllm_compile.passes.multiply_patches import MultiplyPatches
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, run, targets

CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def patch_graph(shape: tuple[int, ...], kernel: tuple[int, ...], *options: Any, bias: bool = True) -> Any:
    """x + one number a channel of a convolution of x [T, HIDDEN] as patches of `shape`."""
    builder = GraphBuilder()
    x = builder.embed()
    weight = builder.weight("patches.weight", HIDDEN, *kernel)
    values = builder.weight("patches.bias", HIDDEN) if bias else None
    patches = builder.method("view", x, -1, *shape)
    found = builder.call(CONVOLUTIONS[len(shape) - 1], patches, weight, values, *options)
    embedded = builder.method("flatten", builder.call(operator.getitem, found, (Ellipsis, slice(0, 1))), 1)
    wide = builder.call(operator.getitem, embedded, (slice(None), slice(0, HIDDEN)))
    return builder.canonical(builder.head(builder.call(operator.add, x, wide)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2, 2, 2), ((2, 2, 2), (0, 0, 0), (1, 1, 1), 1)),
        ((4, 2, 2), ((2, 2), "valid")),
        ((2, 8), ()),
    ],
)
def test_a_kernel_that_covers_its_patch_is_a_linear_of_the_same_numbers(shape, options, bias):
    gm = patch_graph(shape, shape, *options, bias=bias)
    before = run(gm)
    result = MultiplyPatches()(gm)
    assert result.matches == 1
    result.gm.recompile()
    assert not {"conv1d", "conv2d", "conv3d"} & set(targets(result.gm))
    assert torch.allclose(run(result.gm), before, atol=1e-5)
    assert MultiplyPatches()(result.gm).matches == 0


@pytest.mark.parametrize(
    ("shape", "kernel", "options"),
    [
        ((1, 4, 4), (1, 2, 2), ((2, 2),)),  # several numbers a channel
        ((1, 4, 4), (1, 4, 4), ((1, 1), (1, 1))),  # padded
        ((2, 2, 4), (1, 2, 4), ((1, 1), 0, 1, 2)),  # in groups
    ],
)
def test_other_convolutions_stay(shape, kernel, options):
    gm = patch_graph(shape, kernel, *options)
    assert MultiplyPatches()(gm).matches == 0
    assert "conv2d" in targets(gm)
