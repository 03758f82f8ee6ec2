"""RoPE that follows the longest text is held at its frequencies for short ones, and only where that is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.model_folder import ModelFolder
from mllm_compile.config.rope_limit import RopeLimit, rope_limit
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError, UnsupportedModelError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.hold_rope import check_rope_limit
from tests.model.tiny_configs import save_tiny_model, tiny_config

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def limit_of(config: dict[str, Any]) -> RopeLimit | None:
    return rope_limit(ModelFolder(Path("m"), config, ()).text_config_value)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({"rope_parameters": LONGROPE, "max_position_embeddings": 256}, RopeLimit("longrope", 64)),
        (
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32, "max_position_embeddings": 256},
            RopeLimit("longrope", 32),
        ),
        ({"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 256}, RopeLimit("longrope", 256)),
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 256}, RopeLimit("dynamic", 256)),
        ({"rope_parameters": DYNAMIC}, None),
        (
            {"text_config": {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": LONGROPE}}}
            | {"max_position_embeddings": 256},
            RopeLimit("longrope", 64),
        ),
    ],
)
def test_the_limit_is_what_config_json_says(config, limit):
    assert limit_of(config) == limit


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_long_positions_do_not_change_short_ones(rope):
    model = build_config_on_meta(tiny_config("llama", rope_parameters=rope), torch.float32).model
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.rand(8)
    short = rotary(torch.zeros(1), torch.arange(8)[None])
    long = rotary(torch.zeros(1), torch.tensor([[*range(8), 1000]]))
    assert torch.equal(short[0], long[0][:, :8])
    assert torch.equal(short[1], long[1][:, :8])


def test_an_embedding_with_a_scale_of_its_own_for_long_texts_is_refused():
    rope = LONGROPE | {"short_mscale": 1.0, "long_mscale": 2.0}
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'longrope' .* PhimoeRotaryEmbedding.forward reads"):
        build_config_on_meta(tiny_config("phimoe", rope_parameters=rope), torch.float32)


def test_a_limit_that_config_json_does_not_say_is_refused():
    config = tiny_config("llama", rope_parameters=DYNAMIC)
    check_rope_limit(ModelFolder(Path("m"), config.to_dict(), ()), config)
    with pytest.raises(UnsupportedModelError, match=r"constant for 256 positions, which config\.json does not say"):
        check_rope_limit(ModelFolder(Path("m"), {"rope_parameters": DYNAMIC}, ()), config)


def test_max_model_len_ends_where_frequencies_would_change(tmp_path):
    save_tiny_model(tiny_config("llama", rope_parameters=LONGROPE), tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["max_position_embeddings"] == 256
    config = {
        "model": {"path": str(tmp_path / "model")},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu"},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    assert load_or_compile(EngineConfig.from_dict(config)).config.runtime.max_model_len == 64
    config["runtime"]["max_model_len"] = 65
    with pytest.raises(ConfigError, match="beyond 64 tokens rope_type longrope would let one request"):
        load_or_compile(EngineConfig.from_dict(config))
