"""fuse_gelu: which activations it takes, and that numbers stay as they are but for rounding."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mllm_compile.passes.fuse_gelu import FuseGelu
from mllm_compile.passes.match import nodes
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, run, targets


@pytest.fixture(autouse=True)
def kernels_on_cpu(monkeypatch):
    monkeypatch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cpu")


def tower(is_tower=True, dtype=torch.bfloat16, bias=True, approximate="tanh", readers=1, batch=None) -> fx.GraphModule:
    """A feed-forward behind a tower's attention, or a text's; `batch` is what its rows are turned into."""
    builder = GraphBuilder()
    x = builder.embed()
    if is_tower:
        x = builder.call(operator.add, x, builder.packed_attention(x))
    x = builder.method("to", x, dtype)
    x = x if batch is None else builder.method("view", x, *batch, HIDDEN)
    weight = builder.weight("up.weight", 24, HIDDEN, dtype=dtype)
    up = builder.call(nodes.LINEAR, x, weight, builder.weight("up.bias", 24, dtype=dtype) if bias else None)
    wide = builder.call(torch.nn.functional.gelu, up, approximate=approximate)
    wide = builder.call(operator.add, wide, up) if readers > 1 else wide
    wide = wide if batch is None else builder.method("view", wide, -1, 24)
    out = builder.method("to", wide, torch.float32)
    return builder.canonical(builder.head(builder.linear(out, "down", HIDDEN)))


@pytest.mark.parametrize("batch", [None, (1, -1)])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_product_ends_with_its_activation(approximate, batch):
    gm = tower(approximate=approximate, batch=batch)
    before = run(gm)
    result = FuseGelu()(gm)
    result.gm.recompile()
    assert result.matches == 1
    assert "_addmm_activation.default" in targets(gm) and "gelu" not in targets(gm)
    error = (run(result.gm) - before).norm() / before.norm()
    assert error < 2e-2  # a CPU's product ends with GELU by erf
    assert FuseGelu()(result.gm).matches == 0


@pytest.mark.parametrize(
    "said",
    [
        {"is_tower": False},
        {"dtype": torch.float32},
        {"bias": False},
        {"approximate": "none", "dtype": torch.float16},
        {"readers": 2},
        {"batch": (-1, 1)},
    ],
    ids=str,
)
def test_others_stay(said):
    gm = tower(**said)
    assert FuseGelu()(gm).matches == 0
    assert "_addmm_activation.default" not in targets(gm)
