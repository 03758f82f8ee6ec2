"""A folder with a quantised checkpoint of one weight: written, planned and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mllm_compile.checkpoint.plan import plan_weights
from mllm_compile.checkpoint.quantised import read_tensors
from mllm_compile.config.folders.quantisation import read_scheme
from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from mllm_compile.runtime.weights.spec import WeightSpec
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json
from tests.quantised_checkpoints import WrittenFormat

FILE = "model.safetensors"
P = "layers.0.up"
NAME = P + ".weight"


def write(folder: Path, written: WrittenFormat, weight: torch.Tensor, base: str = P) -> torch.Tensor:
    tensors, stands_for = written.quantise(weight)
    save_file({base + suffix: tensor for suffix, tensor in tensors.items()}, folder / FILE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": dict(written.config)}))
    return stands_for


def plan(folder: Path) -> Any:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    scheme = read_scheme(folder, json.loads((folder / "config.json").read_text()))
    return read_tensors(folder, files, scheme)


def load(folder: Path, name: str = NAME, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as a compiled model's is, by the JSON of its spec."""
    tensors = plan(folder).planned
    [spec] = plan_weights({name: (tuple(tensors[name].shape), dtype)}, {}, tensors)
    return loaded(spec, folder)


def loaded(spec: WeightSpec, folder: Path) -> torch.Tensor:
    [spec] = weights_from_json(json.loads(json.dumps(weights_to_json([spec]))))
    weights = allocate_weights([spec], "cpu")
    load_weights([spec], weights, folder)
    return weights[spec.name]


def random_weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
