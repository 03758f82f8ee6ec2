"""The hook into Transformers' recurrent layers: what is replaced, for how long, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch

from mllm_compile.model.states.state_hook import causal_conv, gated_delta, states_as_ops
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config


def model_of(architecture: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(architecture))


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("qwen3_next", {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}),
        ("mamba2", {"causal_conv1d_fn", "mamba2_chunk_scan"}),
        ("lfm3", {"causal_conv1d_fn"}),  # a plain function of that name
        ("llama", set()),
    ],
)
def test_functions_are_replaced_within_the_context_and_put_back(architecture, names):
    model = model_of(architecture)
    namespace = vars(sys.modules[type(model).__module__])
    before = dict(namespace)
    with states_as_ops(model):
        assert {name for name, value in namespace.items() if value is not before[name]} == names
    assert namespace == before
    with pytest.raises(ZeroDivisionError), states_as_ops(model):
        raise ZeroDivisionError
    assert namespace == before


def test_what_a_function_does_not_name_is_dropped_as_the_function_drops_it():
    model = model_of("qwen3_next")
    namespace = vars(sys.modules[type(model).__module__])
    x, weight = torch.randn(1, 6, 5), torch.randn(6, 4)
    expected = namespace["causal_conv1d_fn"](x, weight, activation="silu", position_embeddings=x)
    with states_as_ops(model):
        ours = namespace["causal_conv1d_fn"](x, weight, activation="silu", position_embeddings=x)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "silu", "swish", "gelu", "relu", "tanh", "linear", "gelu_pytorch_tanh"])
def test_a_convolution_may_have_any_activation(activation):
    model = model_of("qwen3_next")
    namespace = vars(sys.modules[type(model).__module__])
    x, weight, bias = torch.randn(1, 6, 5), torch.randn(6, 4), torch.randn(6)
    expected = namespace["causal_conv1d_fn"](x, weight, bias, activation=activation)
    with states_as_ops(model):
        ours = namespace["causal_conv1d_fn"](x, weight, bias, activation=activation)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def refusals_of(name: str, call) -> str:
    """A call's arguments for the gate."""
    graph = torch.fx.symbolic_trace(call).graph
    node = next(node for node in graph.nodes if node.op == "call_function" and name in str(node.target))
    return str(node.args[-1])


def test_an_argument_that_an_op_cannot_express_is_named_for_the_gate():
    def conv(x, weight, states):
        return causal_conv(x, weight, None, "silu", initial_states=states, final_states_out=False, seq_idx=None)

    assert refusals_of("causal_conv", conv) == "keyword initial_states"

    def delta(q, k, v, g, beta, state):
        return gated_delta(q, k, v, g, beta, 64, True, initial_state=state, output_final_state=True)

    assert refusals_of("gated_delta", delta) == "keyword initial_state; keyword output_final_state"


@pytest.mark.parametrize("architecture", ["minimax", "recurrent_gemma", "zaya", "rwkv", "xlstm", "qwen4_exp_text"])
def test_a_mixer_of_its_own_code_computes_by_ops_what_it_computes_itself(architecture, tmp_path):
    model = save_tiny_model(tiny_config(architecture), tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)  # biases too
    ids = torch.randint(FIRST_SPECIAL_TOKEN, (1, 9), generator=torch.Generator().manual_seed(0))
    ids[0, [0, 4, 5]] = FIRST_SPECIAL_TOKEN  # an end of text for qwen4_exp_text
    given = {"input_ids": ids, "position_ids": torch.arange(9)[None], "use_cache": False}
    with torch.no_grad():
        expected = model(**given).logits
        with states_as_ops(model):
            ours = model(**given).logits
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(**given).logits, expected), "its own code is back"
