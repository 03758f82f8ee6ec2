"""Attention that a model writes out is found in its trace, with the scale, the window and the heads that it has."""

from __future__ import annotations

import pytest
import torch

from mllm_compile import Engine
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.supported import check_trace
from mllm_compile.model.trace import Trace, trace_model
from mllm_compile.model.written_attention.find import KNOWS_ITS_MASK
from mllm_compile.passes.match.nodes import is_attention
from tests.model.tiny_configs import WINDOW, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample


def traced(architecture: str, dtype: torch.dtype = torch.float32, **changes: object) -> Trace:
    """Traced and checked: the gate has seen to windows."""
    model = build_config_on_meta(tiny_config(architecture, **changes), dtype)
    trace = trace_model(model, "cpu", 8192)
    check_trace(trace, model)
    return trace


@pytest.mark.parametrize(
    ("architecture", "changes", "kv_heads", "scale", "windows", "knows_its_mask"),
    [
        # Scores in float32; a class for each attention implementation.
        ("gptj", {}, 4, 0.25, [-1] * 4, False),
        # Tables of places for 256 tokens, where a step may have 8192; every second layer's is a window.
        ("gpt_neo", {}, 4, 1.0, [-1, WINDOW - 1] * 2, True),
        # It takes a mask for granted; all heads read one of keys.
        ("falcon", {"new_decoder_architecture": False, "multi_query": True}, 1, 0.25, [-1] * 4, False),
    ],
)
@pytest.mark.parametrize("dtype", slow_but_a_sample([torch.float32, torch.bfloat16], 1))
def test_attention_is_found_as_the_model_has_it(architecture, changes, kv_heads, scale, windows, knows_its_mask, dtype):
    attentions = [
        node for node in traced(architecture, dtype, **changes).graph_module.graph.nodes if is_attention(node)
    ]
    assert [node.args[6] for node in attentions] == windows
    for node in attentions:
        q, k, v = (operand.meta["val"] for operand in node.args[:3])
        assert (q.shape[1], k.shape[1], v.shape[1]) == (4, kv_heads, kv_heads)
        assert {q.dtype, k.dtype, v.dtype, node.meta["val"].dtype} == {dtype}
        assert node.args[4] == pytest.approx(scale, rel=1e-6)
        assert node.meta[KNOWS_ITS_MASK] is knows_its_mask
        assert "attn" in str(node.meta["nn_module_stack"]) or "attention" in str(node.meta["nn_module_stack"])


def test_the_attention_interface_is_as_it_was_after_a_trace_with_masks_of_zero():
    from transformers import AttentionMaskInterface

    traced("falcon")
    assert "mllm" not in AttentionMaskInterface._global_mapping


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    slow_but_a_sample([("bloom", torch.float32), ("bloom", torch.bfloat16), ("mpt", torch.float32)], 1),
)
def test_a_bias_by_distance_is_the_heads_slopes(architecture, dtype):
    """bloom's is made of ones, mpt's is a part of a table; it is added to scores that must have masks."""
    slopes = [2.0 ** (-2 * i) for i in range(1, 5)]
    attentions = [node for node in traced(architecture, dtype).graph_module.graph.nodes if is_attention(node)]
    assert len(attentions) == 4
    for node in attentions:
        assert node.args[8] == pytest.approx(slopes, rel=1e-6)


@pytest.mark.parametrize("architecture", ["gptj", "megatron-bert"])
def test_the_eager_model_is_refused_as_its_attention_cannot_be_replaced(architecture, tmp_path):
    save_tiny_model(tiny_config(architecture), tmp_path / "model")
    config = EngineConfig.from_dict(
        {
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": 64, "skip_compiled": True},
            "cache": {"dir": str(tmp_path / "cache")},
        }
    )
    with pytest.raises(
        UnsupportedModelError, match=r"runtime\.skip_compiled: the model in .* writes its attention out"
    ):
        Engine(config)


def test_a_models_own_tables_are_as_they_were_once_it_is_traced() -> None:
    model = build_config_on_meta(tiny_config("gpt_neo"), torch.float32)
    shapes = {name: tuple(buffer.shape) for name, buffer in model.model.named_buffers()}
    trace_model(model, "cpu", 8192)
    assert {name: tuple(buffer.shape) for name, buffer in model.model.named_buffers()} == shapes
