"""Checkpoints as tools publish them: what is in them beside quantised weights, and several formats in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.checkpoint.plan import read_checkpoint
from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.errors import CheckpointError
from mllm_compile.model.hf_model import build_on_meta
from tests.checkpoint.quantised_folder import FILE, load, plan, random_weight
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.quantised_checkpoints import LINEARS, compressed, quantise_folder


def with_biases(folder: Path, number: float) -> dict[str, PlannedTensor]:
    """The table of a GPTQ checkpoint where every linear has a bias, as its tools write it; Qwen2 has three a layer.

    Args:
        number: what each bias is that the model has none for.
    """
    save_tiny_model(tiny_config("qwen2"), folder / "model")
    quantise_folder(folder / "model", folder / "packed", folder / "plain", LINEARS["gptq"])
    packed = folder / "packed"
    tensors = load_file(packed / FILE)
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        outputs = tensors[name + ".scales"].shape[1]
        tensors.setdefault(name + ".bias", torch.full((outputs,), number, dtype=torch.float16))
    save_file(tensors, packed / FILE)
    return read_checkpoint(plan(packed), build_on_meta(packed, torch.float32).model)


def test_biases_of_zeros_are_left_out_where_the_model_has_none(tmp_path):
    names = {name.split(".")[-2] for name in with_biases(tmp_path, 0.0) if name.endswith(".bias")}
    assert names == {"q_proj", "k_proj", "v_proj"}


def test_a_bias_that_the_model_has_not_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.0.mlp.down_proj.bias' has no place in Qwen2For"):
        with_biases(tmp_path, 0.5)


def test_formats_that_name_their_values_alike_are_told_apart(tmp_path):
    """compressed-tensors' two formats of four-bit floats in one checkpoint: one has a scale more."""
    kinds = {"one": "compressed-tensors mxfp4", "two": "compressed-tensors nvfp4"}
    tensors: dict[str, torch.Tensor] = {}
    expected = {}
    for module, name in kinds.items():
        parts, expected[f"{module}.weight"] = LINEARS[name].quantise(random_weight(32, 64))
        tensors |= {module + suffix: part for suffix, part in parts.items()}
    save_file(tensors, tmp_path / FILE)
    section: dict[str, Any] = compressed("mixed-precision")
    section["config_groups"] = {
        name: {**LINEARS[name].config["config_groups"]["group_0"], "format": LINEARS[name].config["format"]}
        for name in kinds.values()
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    for name, weight in expected.items():
        assert torch.equal(load(tmp_path, name), weight)
