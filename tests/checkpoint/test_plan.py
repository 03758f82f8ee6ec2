"""Every checkpoint that Transformers loads is loaded the same; a tensor too many, too few or misshapen is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.checkpoint.plan import plan_weights, read_checkpoint
from mllm_compile.checkpoint.quantised import read_tensors
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json
from tests.model.tiny_configs import causal_lm_types, save_tiny_model, tiny_config

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def save(folder: Path, model_type: str = "qwen3", *, save_options: dict[str, Any] | None = None, **changes: Any) -> Any:
    return save_tiny_model(tiny_config(model_type, **changes), folder, **(save_options or {}))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """Every parameter and persistent buffer, by the way that a compiled model's weights take."""
    model = build_on_meta(folder, dtype).model
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    table = read_checkpoint(read_tensors(folder, files, None), model)
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
    specs = plan_weights(shapes, {}, table)
    specs = weights_from_json(json.loads(json.dumps(weights_to_json(specs))))
    weights = allocate_weights(specs, "cpu")
    load_weights(specs, weights, folder)
    return weights


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    ("model_type", "as_on_the_hub"),
    [
        ("qwen3", True),
        ("gpt2", True),
        ("phi3", True),
        ("mixtral", True),  # renamed, then experts stacked and joined
        ("mixtral", False),
        ("hrm_text", True),  # gate and up split
        ("olmo_hybrid", True),  # joined
        ("inkling2_text", True),  # interleaved, numbers of layers shifted
        ("gemma3_text", True),
    ],
)
def test_a_checkpoint_is_what_transformers_loads(model_type, as_on_the_hub, tmp_path):
    if model_type not in causal_lm_types():
        pytest.skip(f"this version of Transformers has no {model_type}")
    model = save(tmp_path, model_type, save_options={"save_original_format": as_on_the_hub})
    assert_same(load(tmp_path), model.state_dict())


def test_shards_are_read_by_their_index(tmp_path):
    model = save(tmp_path, save_options={"max_shard_size": "100KB"})
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path), model.state_dict())


def test_a_base_model_checkpoint_gets_its_prefix(tmp_path):
    model = save(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / WEIGHTS)
    assert_same(load(tmp_path), model.state_dict())


@pytest.mark.parametrize("given", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_may_be_given_under_either_name(given, tmp_path):
    model = save(tmp_path, tie_word_embeddings=True)

    def rename(tensors: Tensors) -> Tensors:
        assert "lm_head.weight" not in tensors
        return {given if name == "model.embed_tokens.weight" else name: value for name, value in tensors.items()}

    rewrite(tmp_path, rename)
    assert_same(load(tmp_path), model.state_dict())


def test_half_precision_is_widened_and_full_narrowed(tmp_path):
    model = save(tmp_path)
    rewrite(tmp_path, lambda tensors: {name: value.half() for name, value in tensors.items()})
    assert_same(load(tmp_path), {name: value.half().float() for name, value in model.state_dict().items()})
    half = {name: value.half().bfloat16() for name, value in model.state_dict().items()}
    assert_same(load(tmp_path, torch.bfloat16), half)


def test_buffers_of_old_checkpoints_are_left_out(tmp_path):
    model = save(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.position_ids": torch.arange(9)}
    rewrite(tmp_path, lambda tensors: tensors | old)
    assert_same(load(tmp_path), model.state_dict())


Q = "model.layers.2.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (
        lambda tensors: {name: value for name, value in tensors.items() if name != Q},
        f"the checkpoint lacks '{Q}'",
    ),
    "unexpected": (
        lambda tensors: tensors | {"model.layers.7.mlp.up_proj.weight": torch.ones(96, 64)},
        "'model.layers.7.mlp.up_proj.weight' has no place in Qwen3ForCausalLM",
    ),
    "wrongly shaped": (
        lambda tensors: tensors | {Q: torch.ones(64, 65)},
        rf"'{Q}' has shape \[64, 65\], the model's config.json says \[64, 64\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tensor_that_does_not_fit_is_named(damage, tmp_path):
    change, message = DAMAGES[damage]
    save(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("lost", ["experts.3.w1", "experts.3."])
def test_a_missing_expert_is_named(tmp_path, lost):
    """One of its matrices, or all of the last one's: nothing tells but the config that there was another."""
    save(tmp_path, "mixtral")
    lost = f"model.layers.1.block_sparse_moe.{lost}"
    rewrite(tmp_path, lambda tensors: {name: value for name, value in tensors.items() if not name.startswith(lost)})
    named = "model.layers.1.block_sparse_moe.experts.3.w[12].weight"
    with pytest.raises(CheckpointError, match=f"the checkpoint lacks '{named}'$"):
        load(tmp_path)


def test_more_experts_than_the_config_says_are_an_error(tmp_path):
    save(tmp_path, "qwen3_moe", num_experts=4)
    fifths = {name: name.replace("experts.0", "experts.4") for name in load_file(tmp_path / WEIGHTS)}
    rewrite(tmp_path, lambda tensors: tensors | {fifths[name]: value.clone() for name, value in tensors.items()})
    with pytest.raises(CheckpointError, match=r"make shape \[5, .*config.json says \[4, "):
        load(tmp_path)


FIRST = "model.layers.0.mlp.experts.0.down_proj.weight"
THIRD, FIFTH = (FIRST.replace("experts.0", f"experts.{number}") for number in (2, 4))


def test_experts_whose_numbers_have_a_gap_are_not_served_under_each_others_numbers(tmp_path):
    """As many as the config says, so that shapes fit."""
    save(tmp_path, "qwen3_moe", num_experts=4)
    rewrite(tmp_path, lambda tensors: tensors | {FIFTH: tensors.pop(THIRD)})
    with pytest.raises(CheckpointError, match=f"lacks '{THIRD}'; it has later ones"):
        load(tmp_path)


def test_experts_that_are_there_one_by_one_and_stacked_are_an_error(tmp_path):
    save(tmp_path, "qwen3_moe", num_experts=4)
    stacked = "model.layers.0.mlp.experts.down_proj"
    rewrite(tmp_path, lambda tensors: tensors | {stacked: torch.zeros(4, *tensors[FIRST].shape)})
    with pytest.raises(CheckpointError, match=f"'{stacked}' and '{FIRST}' both stand for '{stacked}'"):
        load(tmp_path)


@pytest.mark.parametrize("twin", [THIRD.removeprefix("model."), THIRD.replace("experts.2", "experts.02")])
def test_an_expert_that_is_there_twice_is_named(twin, tmp_path):
    """Under another name for the same place; it is not a fifth one with others missing."""
    save(tmp_path, "qwen3_moe", num_experts=4)
    rewrite(tmp_path, lambda tensors: tensors | {twin: tensors[THIRD].clone()})
    first, second = sorted((twin, THIRD))
    named = f"tensors '{first}' and '{second}' both stand for number 2 of 'model.layers.0.mlp.experts.down_proj'"
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


def test_an_expert_of_another_shape_is_an_error(tmp_path):
    save(tmp_path, "qwen3_moe", num_experts=4)
    rewrite(tmp_path, lambda tensors: tensors | {THIRD: torch.zeros(3, 5)})
    named = rf"tensor '{THIRD}' of shape \[3, 5\], and others like it of \[64, 32\], cannot be put together to"
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    save(tmp_path)
    save_file({Q: torch.ones(64, 64)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor '{Q}' is in model.safetensors and in more.safetensors"):
        load(tmp_path)


def test_two_tensors_for_one_place_are_an_error(tmp_path):
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {Q.removeprefix("model."): torch.ones(64, 64)})
    with pytest.raises(CheckpointError, match=f"both stand for '{Q}'"):
        load(tmp_path)


def test_a_conversion_that_computes_is_refused_by_name(tmp_path, monkeypatch):
    from transformers.core_model_loading import Concatenate

    def convert(self: Any, input_dict: Any, **kwargs: Any) -> Any:
        return {pattern: tensors[0] + 1 for pattern, tensors in input_dict.items()}

    save(tmp_path, "mixtral")
    monkeypatch.setattr(Concatenate, "convert", convert)
    with pytest.raises(UnsupportedModelError, match=r"\(MergeModulelist, Concatenate\), which is not supported yet"):
        load(tmp_path)
