"""pad_linears: which linears it takes, and that numbers stay as they are."""

from __future__ import annotations

import operator

import pytest
import torch

from mllm_compile.passes.match import nodes
from mllm_compile.passes.pad_linears import PadLinears
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, run, targets


@pytest.fixture(autouse=True)
def kernels_on_cpu(monkeypatch):
    monkeypatch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(nodes, "KERNEL_DTYPES", (torch.float32,))


def tower(width: int, is_tower: bool = True):
    """A feed-forward of `width` features, behind a tower's attention or a text's."""
    builder = GraphBuilder()
    x = builder.embed()
    if is_tower:
        x = builder.call(operator.add, x, builder.packed_attention(x))
    wide = builder.call(torch.relu, builder.linear(x, "up", width))
    return builder.canonical(builder.head(builder.linear(wide, "down", HIDDEN, bias=True)))


def test_rows_of_any_size_become_multiples_of_eight():
    gm = tower(1021)
    before = run(gm)
    result = PadLinears()(gm)
    assert result.matches == 1
    result.gm.recompile()
    widths = [node.args[1].meta["val"].shape[-1] for node in result.gm.graph.nodes if node.target is nodes.LINEAR]
    assert widths == [HIDDEN, 1024, HIDDEN]
    assert torch.allclose(run(result.gm), before, atol=1e-5)
    assert PadLinears()(result.gm).matches == 0


@pytest.mark.parametrize(("width", "is_tower"), [(1024, True), (21, True), (1021, False)])
def test_others_stay(width, is_tower):
    gm = tower(width, is_tower)
    assert PadLinears()(gm).matches == 0
    assert "constant_pad_nd" not in targets(gm)


def test_a_cpu_has_no_use_for_it(monkeypatch):
    monkeypatch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cuda")
    assert PadLinears()(tower(1021)).matches == 0
