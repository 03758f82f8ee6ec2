"""Values that a model computes on the host without inputs are constants of a trace for a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from mllm_compile.model.trace import keep_host_values

DEVICE = "meta"  # stands for a GPU


def traced() -> fx.GraphModule:
    """Frequencies that are made in the forward; a number that depends on an input stays."""
    graph = fx.Graph()
    positions = graph.placeholder("positions")
    positions.meta |= {"input_name": "positions", "val": torch.empty(5, dtype=torch.int64, device=DEVICE)}
    powers = graph.call_function(torch.arange, (0, 8, 2), {"dtype": torch.float32})
    powers.meta["val"] = torch.arange(0, 8, 2, dtype=torch.float32)
    rates = graph.call_function(torch.pow, (10000.0, powers))
    rates.meta["val"] = torch.empty(4)
    shifted = graph.call_method("add", (rates, 1.0))
    shifted.meta["val"] = torch.empty(4)
    there = graph.call_method("to", (shifted,), {"device": DEVICE})
    there.meta["val"] = torch.empty(4, device=DEVICE)
    on_host = graph.call_method("to", (positions,), {"device": "cpu"})
    on_host.meta["val"] = torch.empty(5, dtype=torch.int64)
    half = graph.call_function(torch.tensor, (0.5,))
    half.meta["val"] = torch.tensor(0.5)
    scaled = graph.call_function(torch.mul, (there, half))
    scaled.meta["val"] = torch.empty(4, device=DEVICE)
    graph.output((there, on_host, scaled))
    return fx.GraphModule({}, graph)


def model_without_constants() -> Any:
    return SimpleNamespace(model=torch.nn.Module(), constants={})


def test_it_is_computed_once_on_the_host_and_copied_by_no_step():
    gm, hf_model = traced(), model_without_constants()
    keep_host_values(gm, hf_model, DEVICE)
    ((name, value),) = hf_model.constants.items()
    assert name in dict(hf_model.model.named_buffers()) and name not in hf_model.model.state_dict()
    assert torch.equal(value, torch.pow(10000.0, torch.arange(0, 8, 2, dtype=torch.float32)) + 1.0)
    kept = next(node for node in gm.graph.nodes if node.meta.get("weight_name") == name)
    assert kept.op == "placeholder" and kept.meta["val"].device.type == DEVICE
    assert not any(node.target in (torch.arange, torch.pow, "add") for node in gm.graph.nodes)
    there, on_host, scaled = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    assert scaled.args[1].target is torch.tensor, "a number is no copy"
    assert there.args == (kept,)
    assert [node.name for node in on_host.all_input_nodes] == ["positions"], "what an input decides is no constant"


def test_on_the_host_itself_a_trace_stays_as_it_is():
    gm, hf_model = traced(), model_without_constants()
    before = str(gm.graph)
    keep_host_values(gm, hf_model, "cpu")
    assert (str(gm.graph), hf_model.constants) == (before, {})
