"""Adapters as PEFT writes them, of random numbers: their folders, and what they add to the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PREFIX = "base_model.model."


def matrices(
    shapes: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Tensors by PEFT's names.

    Args:
        shapes: module → (outputs, inputs).
    """
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in shapes.items():
        down, up = torch.randn(rank, inputs, generator=chance), torch.randn(outputs, rank, generator=chance)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = (down / inputs**0.5).to(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = (up / 4).to(dtype)
    return tensors


def peft_fields(targets: Iterable[str] | str, rank: int = 4, **changes: Any) -> dict[str, Any]:
    """The fields of an adapter_config.json, with the keys that PEFT 0.21 writes."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | changes


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> Path:
    """Writes the folder of an adapter, which need not be there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
