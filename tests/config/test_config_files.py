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


@pytest.mark.parametrize("name", ["tiny", "qwen-shape", "qwen-8b-shape"])
def test_a_config_for_machines_with_no_hub_names_a_folder_of_the_repository(name: str) -> None:
    config = EngineConfig.from_yaml(CONFIGS / f"{name}.yaml")
    assert (Path(config.model.path) / "config.json").is_file()


@pytest.mark.parametrize(
    ("folder", "hidden", "ffn", "layers", "heads", "tied"),
    [("qwen3-0.6b", 1024, 3072, 28, 16, True), ("qwen3-8b", 4096, 12288, 36, 32, False)],
)
def test_a_shape_is_that_of_the_model_that_it_stands_for(
    folder: str, hidden: int, ffn: int, layers: int, heads: int, tied: bool
) -> None:
    config = json.loads((CONFIGS / "shapes" / folder / "config.json").read_text())
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (hidden, ffn, layers)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (heads, 8, 128)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (151_936, 40_960)
    assert config["tie_word_embeddings"] is tied
    assert config["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}
