"""A model on meta: its constants are what Transformers computes when it loads one, and odd configs are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import build_config_on_meta, build_on_meta, fake_copy
from mllm_compile.runtime.attention.layer import LayerSpec
from tests.model.tiny_configs import save_tiny_model, tiny_config

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 12345.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 10000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def constants_of_loaded(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    persistent = set(model.state_dict())
    return {name: value for name, value in model.named_buffers() if name not in persistent}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_match_a_loaded_model(rope, tmp_path):
    save_tiny_model(tiny_config("llama", rope_parameters=ROPES[rope]), tmp_path)
    expected = constants_of_loaded(tmp_path)
    built = build_on_meta(tmp_path, torch.float32)
    assert set(built.constants) == set(expected)
    assert not built.unknown_constants
    for name, value in expected.items():
        assert torch.equal(built.constants[name], value), name


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma3n_text", "modernbert-decoder", "gpt_oss"])
def test_constants_of_every_kind_match_a_loaded_model(model_type, tmp_path):
    save_tiny_model(tiny_config(model_type), tmp_path)
    built = build_on_meta(tmp_path, torch.float32)
    for name, value in constants_of_loaded(tmp_path).items():
        assert torch.equal(built.constants[name], value), name


@pytest.mark.parametrize(
    "old", [{"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}]
)
def test_rope_of_an_old_config_file_is_understood(old, tmp_path):
    save_tiny_model(tiny_config("llama"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | old))
    built, expected = build_on_meta(tmp_path, torch.float32), constants_of_loaded(tmp_path)
    assert torch.equal(built.constants["model.rotary_emb.inv_freq"], expected["model.rotary_emb.inv_freq"])
    factor = old.get("rope_scaling", {}).get("factor", 1.0)
    assert built.constants["model.rotary_emb.inv_freq"][0] == 1 / factor


def test_parameters_stay_on_meta_in_the_dtype_asked_for():
    model = build_config_on_meta(tiny_config("qwen3"), torch.bfloat16).model
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_a_fake_copy_keeps_ties():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build_config_on_meta(tiny_config("qwen3", tie_word_embeddings=True), torch.float32).model
    names = fake_copy(model, FakeTensorMode(), "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert names[id(model.lm_head.weight)] == "model.embed_tokens.weight"


def test_sizes_are_the_config_s_and_heads_the_layers_own():
    built = build_config_on_meta(tiny_config("qwen3"), torch.float32)
    sizes = built.sizes()
    assert (sizes.num_attention_heads, sizes.num_kv_heads, sizes.head_dim) == (4, 2, 16)
    assert (sizes.vocab_size, sizes.context_len, sizes.num_hidden_layers) == (128, 256, 4)
    layer = LayerSpec("l", 0, 8, 3, 40, 40, 1.0, 0.0, -1, None)
    sizes = built.sizes([layer])
    assert (sizes.num_attention_heads, sizes.num_kv_heads, sizes.head_dim) == (8, 3, 40)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_model"}, "Transformers cannot read .*no_such_model"),
        ({}, "Transformers cannot read .*model_type"),
        (
            {"model_type": "qwen3", "hidden_size": "wide"},
            "'hidden_size': TypeError: Field 'hidden_size' expected int, got str",
        ),
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"model_type": "vit"}, "'vit' is not a causal language model"),
        ({"model_type": "qwen3", "hidden_act": "sillu"}, "hidden_act is 'sillu' .* Did you mean 'silu'"),
        ({"model_type": "gpt2", "activation_function": "?"}, "activation_function is '\\?' .* does not know.$"),
        (
            {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": -1},
            "`num_hidden_layers` \\(-1\\) must be equal",
        ),
    ],
)
def test_a_config_that_is_no_causal_lm_is_refused_in_one_line(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        build_on_meta(tmp_path, torch.float32).sizes()
    assert "\n" not in str(refused.value)
