"""The files in configs/: each one is valid, and the shape-only ones are the shapes that are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mllm_compile.config.schema import EngineConfig

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_config_is_valid_and_opens_with_what_it_is_for(path: Path) -> None:
    EngineConfig.from_yaml(path)
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "qwen-shape",
        "qwen-8b-shape",
        "qwen-30b-a3b-4-layers",
        "qwen3_5-text-shape",
        "nemotron-h-8b-shape",
        "gpt-oss-20b-shape",
        "gpt-oss-120b-shape",
    ],
)
def test_a_config_for_machines_with_no_hub_names_a_folder_of_the_repository(name: str) -> None:
    config = EngineConfig.from_yaml(CONFIGS / f"{name}.yaml")
    assert (Path(config.model.path) / "config.json").is_file()


@pytest.mark.parametrize(
    ("folder", "hidden", "ffn", "layers", "heads", "tied"),
    [("qwen3-0.6b", 1024, 3072, 28, 16, True), ("qwen3-8b", 4096, 12288, 36, 32, False)],
)
def test_a_shape_matches_its_model(folder: str, hidden: int, ffn: int, layers: int, heads: int, tied: bool) -> None:
    config = json.loads((CONFIGS / "shapes" / folder / "config.json").read_text())
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (hidden, ffn, layers)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (heads, 8, 128)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (151_936, 40_960)
    assert config["tie_word_embeddings"] is tied
    assert config["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}


def test_four_layers_of_a_mixture_of_experts_match_the_whole_one() -> None:
    whole, cut = (
        json.loads((CONFIGS / "shapes" / f"qwen3-30b-a3b{layers}" / "config.json").read_text())
        for layers in ("", "-4-layers")
    )
    assert cut.pop("num_hidden_layers") == cut.pop("max_window_layers") == 4
    assert cut == {
        name: value for name, value in whole.items() if name not in ("num_hidden_layers", "max_window_layers")
    }


def test_the_shape_of_qwen3_5_is_transformers_default() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = json.loads((CONFIGS / "shapes" / "qwen3_5-text" / "config.json").read_text())
    default = Qwen3_5TextConfig().to_dict()
    names = set(config) - {"architectures", "dtype"}
    assert {name: config[name] for name in names} == {name: default[name] for name in names}


def test_the_shape_of_nemotron_h_8b_has_its_layers() -> None:
    """`hybrid_override_pattern` of nvidia/Nemotron-H-8B-Base-8K, whose letters Transformers reads as these types."""
    config = json.loads((CONFIGS / "shapes" / "nemotron-h-8b" / "config.json").read_text())
    letters = {"linear_attention": "M", "mlp": "-", "full_attention": "*"}
    pattern = "".join(letters[kind] for kind in config["layers_block_type"])
    assert pattern == "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    assert config["mamba_num_heads"] * config["mamba_head_dim"] == config["expand"] * config["hidden_size"]


@pytest.mark.parametrize(("name", "params", "file_bytes"), [("20b", 20.91e9, 13.76e9), ("120b", 116.83e9, 65.25e9)])
def test_the_shapes_of_gpt_oss_have_the_published_sizes(name: str, params: float, file_bytes: float) -> None:
    """Parameters as table 1 of its model card (arXiv 2508.10925) counts them, and the bytes of the published files:
    experts in MXFP4, a byte for each 32, and all else in bfloat16."""
    config = json.loads((CONFIGS / "shapes" / f"gpt-oss-{name}" / "config.json").read_text())
    layers, hidden, ffn, experts = (
        config[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_local_experts")
    )
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * (layers // 2)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = (heads + 2 * kv_heads) * config["head_dim"]
    of_experts = layers * experts * 3 * hidden * ffn
    biases = layers * experts * (2 * ffn + hidden)
    attention = layers * (rows * (hidden + 1) + hidden * (heads * config["head_dim"] + 1) + heads)
    others = attention + layers * (experts * (hidden + 1) + 2 * hidden) + hidden + 2 * config["vocab_size"] * hidden
    assert of_experts + biases + others == pytest.approx(params, rel=1e-3)
    assert of_experts * 17 / 32 + 2 * (biases + others) == pytest.approx(file_bytes, rel=1e-3)
