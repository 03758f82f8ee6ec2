"""A model of three layers, its adapters, and what they add to a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mllm_compile.adapters.base_model import BaseModel
from mllm_compile.adapters.peft_folder import AdapterTensors
from tests.adapters.folders import PREFIX, matrices, peft_fields, write_adapter

SHAPES = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(3)
    for module, shape in {"self_attn.q_proj": (6, 5), "self_attn.v_proj": (3, 5), "mlp.down_proj": (5, 9)}.items()
}
QUERIES = {module: shape for module, shape in SHAPES.items() if module.endswith("q_proj")}
BASE = BaseModel(
    source="org/Model-8B",
    targets={f"{module}.weight": shape for module, shape in SHAPES.items()},
    modules={*SHAPES, "model.norm", "lm_head"},
    elsewhere={},
    max_rank=8,
    dtype=torch.float32,
)
FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


def written(folder: Path, shapes: dict[str, tuple[int, int]] = SHAPES, rank: int = 4, **changes: Any) -> Path:
    targets = {module.rpartition(".")[2] for module in shapes}
    return write_adapter(folder, matrices(shapes, rank), peft_fields(targets, rank, **changes))


def product(adapter: AdapterTensors, weight: str) -> torch.Tensor:
    down, up = adapter.matrices[weight]
    return up @ down


def expected(tensors: dict[str, torch.Tensor], module: str, scale: float) -> torch.Tensor:
    return scale * tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]
