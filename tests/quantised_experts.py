"""Tiny mixtures of experts as they are published in few bits, beside plain twins of the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.quantised_checkpoints import LINEARS, MXFP4, quantise_folder, set_quantisation

WEIGHTS = "model.safetensors"
# gpt-oss' experts in mxfp4, stacked and transposed; each of Qwen's experts as a linear of its own.
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
FORMATS = ("mxfp4", "fp8 blocks", "awq", "gptq", "compressed-tensors int4", "compressed-tensors mxfp4")


def write_experts(name: str, folder: Path, changes: Mapping[str, Any]) -> tuple[Path, Path]:
    """Writes a model in the format of this name; returns its folder and its plain twin's.

    Args:
        changes: to the tiny model's config.
    """
    packed, plain = folder / "packed", folder / "plain"
    if name != "mxfp4":
        save_tiny_model(tiny_config("qwen3_moe", num_hidden_layers=2, **changes), folder / "model")
        quantise_folder(folder / "model", packed, plain, LINEARS[name])
        return packed, plain
    for one in (packed, plain):
        save_tiny_model(tiny_config("gpt_oss", **TWO_LAYERS, **changes), one)
    save_file(pack_in_mxfp4(packed), plain / WEIGHTS, metadata={"format": "pt"})
    return packed, plain


def pack_in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Writes the experts of gpt-oss there in MXFP4; returns the tensors of a plain twin."""
    tensors, stand_for = {}, {}
    for key, weight in load_file(folder / WEIGHTS).items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, stand_for[key] = MXFP4.quantise(weight)
            tensors |= {key + suffix: part for suffix, part in parts.items()}
        else:
            tensors[key] = stand_for[key] = weight
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    set_quantisation(folder, MXFP4.config)
    return stand_for
