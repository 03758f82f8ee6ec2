"""Experts that models loop over themselves: for a trace they are ops of ours, and compute what the loops compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mllm_compile.compiler.program_builder import build_program
from mllm_compile.model.experts_hook import experts_as_ops, experts_of_layers
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.looped_experts import looped_experts
from mllm_compile.model.supported import check_trace
from mllm_compile.model.trace import trace_model
from mllm_compile.passes.group_experts import GroupExperts
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.passes.pipeline import PASSES
from mllm_compile.runtime.program.spec import ExpertWeight
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.passes.support.stand_ins import ALL, stand_in_ops

HIDDEN, TOKENS = 64, 40
EXPERTS, CHOSEN, CHOICES_OF_NONE = 4, 2, 3
REPLACED = {"forward", "map", "reduce"}


def config_of(name: str) -> Any:
    """One layer; where a token may choose none, that is nearly every second choice."""
    if name == "longcat_flash":  # each of its layers attends twice
        return tiny_config(name, num_layers=1, num_hidden_layers=2, zero_expert_num=CHOICES_OF_NONE)
    return tiny_config(name, num_hidden_layers=1)


def of_tokens(outputs: int) -> ExpertWeight:
    return ExpertWeight(EXPERTS, CHOSEN, HIDDEN, outputs, of_tokens=True)


def of_choices(inputs: int) -> ExpertWeight:
    return ExpertWeight(EXPERTS, CHOSEN, inputs, HIDDEN, of_tokens=False)


# The weights of a layer's experts; gate and up are one weight, or two.
WEIGHTS = {
    "dbrx": {
        "transformer.blocks.0.ffn.experts.mlp.w1": of_tokens(96),
        "transformer.blocks.0.ffn.experts.mlp.v1": of_tokens(96),
        "transformer.blocks.0.ffn.experts.mlp.w2": of_choices(96),
    },
    "jetmoe": {
        "model.layers.0.self_attention.experts.input_linear.weight": of_tokens(32),
        "model.layers.0.self_attention.experts.output_linear.weight": of_choices(32),
        "model.layers.0.mlp.input_linear.weight": of_tokens(2 * 96),
        "model.layers.0.mlp.output_linear.weight": of_choices(96),
    },
    "longcat_flash": {
        "model.layers.0.mlp.experts.gate_up_proj": of_tokens(2 * 32),
        "model.layers.0.mlp.experts.down_proj": of_choices(32),
    },
}


@pytest.fixture(scope="module", params=WEIGHTS)
def model(request, tmp_path_factory):
    return save_tiny_model(config_of(request.param), tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def test_a_layer_computes_what_its_loop_does(model):
    modules = [found.module for found in looped_experts(model)]
    assert modules
    for module in modules:
        call = call_of(module)
        expected = call()
        with experts_as_ops(model):
            assert REPLACED & set(vars(module))
            torch.testing.assert_close(call(), expected, rtol=1e-5, atol=1e-5)
        assert not REPLACED & set(vars(module)), "the self-check compares with the model's own"


def call_of(module: Any) -> Callable[[], torch.Tensor]:
    """A call of the module with inputs that are always the same."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=generator)
    if hasattr(module, "map"):
        return lambda: around_attention(module, hidden)
    if hasattr(module, "router"):
        return lambda: module(hidden)
    has_none = hasattr(module, "zero_expert_num")
    scores = torch.randn(TOKENS, EXPERTS + CHOICES_OF_NONE * has_none, generator=generator)
    weights, ids = scores.softmax(-1).topk(CHOSEN)
    if has_none:
        num_none = (ids >= EXPERTS).sum(-1)
        assert set(num_none.tolist()) == {0, 1, 2}
    return lambda: module(hidden[0] if has_none else hidden, ids, weights)


def around_attention(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    queries, _, others = module.map(hidden)
    return module.reduce(queries.tanh(), others)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_program_has_their_weights_as_experts_with_kernels_and_without(name):
    hf_model = build_config_on_meta(config_of(name), torch.float32)
    trace = trace_model(hf_model, "cpu", 8192)
    check_trace(trace, hf_model)
    gm = trace.graph_module
    with stand_in_ops(ALL):
        for graph_pass in (*(one for one in PASSES if not one.needs), GroupExperts):
            if graph_pass is GroupExperts:
                assert build_program(gm).expert_weights == WEIGHTS[name]
            gm = graph_pass()(gm).gm
    assert build_program(gm).expert_weights == WEIGHTS[name]
    pieces = [gm.get_submodule(piece).graph for piece in called_pieces(gm)]
    assert not any(is_op(node, "expert_linear") for graph in pieces for node in graph.nodes)


def test_choices_of_none_have_no_parameters_that_are_read():
    (sizes,) = experts_of_layers(build_config_on_meta(config_of("longcat_flash"), torch.float32).model)
    assert sizes.params == EXPERTS * 3 * 32 * HIDDEN
    assert sizes.unread_params == CHOICES_OF_NONE * 2 * 32 * HIDDEN
    assert sizes.num_choices == EXPERTS + CHOICES_OF_NONE


def test_a_choice_beyond_experts_and_none_is_an_error(tmp_path):
    model = save_tiny_model(config_of("longcat_flash"), tmp_path)
    (module,) = [found.module for found in looped_experts(model)]
    ids = torch.tensor([[0, EXPERTS + CHOICES_OF_NONE]])
    with experts_as_ops(model), pytest.raises(IndexError, match="a router chose an expert beyond the 4 there are"):
        module(torch.ones(1, HIDDEN), ids, torch.ones(1, CHOSEN))
