"""Mixtures of experts in a trace: ops of ours alone; what cannot be right is refused by name."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.gate import check_trace
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.trace import trace_model
from mllm_compile.passes.match.nodes import is_op
from tests.model.tiny_configs import LAYERS, tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_trace_has_two_linears_a_layer_and_no_op_of_transformers(name, dtype):
    hf_model = build_config_on_meta(tiny_config(name), dtype)
    before = hf_model.model.config._experts_implementation
    graph = trace_model(hf_model, "cpu", 8192).graph_module.graph
    assert sum(is_op(node, "expert_linear") for node in graph.nodes) == 2 * LAYERS
    assert not any("grouped_mm" in str(node.target) for node in graph.nodes)
    assert hf_model.model.config._experts_implementation == before, "the self-check compares with the model's own"


def test_an_op_of_another_library_is_refused_by_name():
    library = torch.library.Library("elsewhere", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    hf_model = build_config_on_meta(tiny_config("llama"), torch.float32)
    trace = trace_model(hf_model, "cpu", 8192)
    node = next(node for node in trace.graph_module.graph.nodes if node.op == "call_function")
    node.target = torch.ops.elsewhere.twice
    with pytest.raises(UnsupportedModelError, match="calls elsewhere::twice, an op of another library's"):
        check_trace(trace, hf_model)
    del library


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 and num_experts 4"),
        ("gemma4_text", {"enable_moe_block": True, "top_k_experts": 5}, "top_k_experts 5 and num_experts 4"),
    ],
)
def test_more_choices_than_experts_are_refused_when_the_model_is_traced(name, said, message):
    config = tiny_config(name, num_experts=4, moe_intermediate_size=32, **said)
    with pytest.raises(UnsupportedModelError, match=message):
        trace_model(build_config_on_meta(config, torch.float32), "cpu", 8192)
