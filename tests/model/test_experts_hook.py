"""Mixtures of experts in a trace: ops of ours alone; what cannot be right is refused by name."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model.experts_hook import check_choices, experts_per_token
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.supported import check_trace
from mllm_compile.model.trace import trace_model
from mllm_compile.passes.match.nodes import is_op
from tests.model.tiny_configs import LAYERS, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but_a_sample(product(["qwen3_moe", "gpt_oss"], [torch.float32, torch.bfloat16, torch.float16]), 2),
)
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


@pytest.mark.parametrize(
    ("name", "said", "chosen"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 3}, 3),
        ("aria_text", {"moe_topk": 3}, 3),
        ("dbrx", {"ffn_config": {"moe_top_k": 3}}, 3),
        ("ernie4_5_moe", {"num_experts_per_tok": 3}, 3),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 3}, 3),
        ("hunyuan_v1_moe", {"num_experts_per_tok": [1, 2, 3, 2]}, 3),
        ("longcat_flash", {"num_experts_per_tok": 7, "zero_expert_num": 3}, 7),
        ("llama", {}, 1),
    ],
)
def test_experts_a_token_are_known_however_a_config_calls_them(name, said, chosen):
    config = tiny_config(name, **said)
    check_choices(config)
    assert experts_per_token(config) == chosen


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("aria_text", {"moe_num_experts": 4, "moe_topk": 5}, "moe_topk 5 and moe_num_experts 4"),
        ("dbrx", {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 5}}, "moe_top_k 5 and moe_num_experts 4"),
        ("hunyuan_v1_moe", {"num_experts_per_tok": [1, 2, 5, 2]}, "num_experts_per_tok 5 and num_experts 4"),
        ("longcat_flash", {"num_experts_per_tok": 8, "zero_expert_num": 3}, "num_experts_per_tok 8 and num_local_exp"),
    ],
)
def test_more_choices_than_experts_are_refused_however_a_config_calls_them(name, said, message):
    with pytest.raises(UnsupportedModelError, match=message):
        check_choices(tiny_config(name, **said))


def test_a_gate_that_chooses_an_expert_that_is_not_there_is_named_when_the_model_is_compiled(tmp_path, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    save_tiny_model(tiny_config("qwen3_moe", num_hidden_layers=1), tmp_path / "model")
    route = Qwen3MoeTopKRouter.forward

    def route_to_the_next(self, hidden_states):
        *others, ids = route(self, hidden_states)
        return (*others, ids + 1)

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", route_to_the_next)
    config = EngineConfig.from_dict(
        {
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": 64},
            "cache": {"dir": str(tmp_path / "cache")},
        }
    )
    with pytest.raises(CompileError, match=r"a router chose an expert beyond the 4 there are: .*4"):
        load_or_compile(config)
