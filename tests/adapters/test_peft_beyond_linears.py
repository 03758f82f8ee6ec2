"""mllm_compile/adapters/peft_folder.py: embeddings, heads and experts, and magnitudes beside factors (DoRA)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mllm_compile.adapters.base_model import BaseModel, StackedExperts
from mllm_compile.adapters.peft_folder import read_adapter
from mllm_compile.errors import MllmError
from tests.adapters.folders import PREFIX, matrices, peft_fields, write_adapter
from tests.adapters.three_layers import BASE, QUERIES, SHAPES, expected, written

ENDS = {"model.embed_tokens": (5, 11), "lm_head": (11, 5)}
TABLE = torch.arange(55.0).view(11, 5) / 7


def ends(folder: Path, **changes: torch.Tensor) -> Path:
    """An adapter of an embedding and a head with copies of both, as PEFT saves it; other tensors by their suffix."""
    tensors = matrices(ENDS)
    for half in "AB":
        tensors[f"{PREFIX}model.embed_tokens.lora_embedding_{half}"] = tensors.pop(
            f"{PREFIX}model.embed_tokens.lora_{half}.weight"
        )
    copies = {f"{PREFIX}{module}.base_layer.weight": TABLE.clone() for module in ENDS}
    return write_adapter(folder, tensors | copies | changes, peft_fields(["embed_tokens", "lm_head"]))


def with_ends(**changes: Any) -> BaseModel:
    own = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    targets = {f"{module}.weight": shape for module, shape in ENDS.items()}
    read = {"read": lambda weight, start, rows: TABLE[start : start + rows].to(torch.bfloat16).float()}
    return BaseModel(**vars(BASE) | {"targets": {**BASE.targets, **targets}} | own | read | changes)


def test_an_embedding_and_a_head_may_come_with_copies_of_the_base_model_s(tmp_path):
    copies = {f"{PREFIX}{module}.base_layer.weight": TABLE.to(torch.bfloat16) for module in ENDS}
    adapter = read_adapter(ends(tmp_path, **copies), with_ends())
    assert {weight: tuple((up @ down).shape) for weight, (down, up) in adapter.matrices.items()} == {
        f"{module}.weight": shape for module, shape in ENDS.items()
    }


@pytest.mark.parametrize(
    ("changes", "base", "said"),
    [
        ({}, {}, "its copy of lm_head.weight is not that of org/Model-8B; trained or resized"),
        ({}, {"read": lambda *_: None}, "its copy of lm_head.weight cannot be compared with that of"),
        ({"lm_head.base_layer.weight": torch.zeros(12, 5)}, {}, "its copy of lm_head.weight is not that of"),
        ({"lm_head.lora_embedding_A": torch.zeros(4, 5)}, {}, "has one of the two factors of lm_head"),
    ],
)
def test_a_copy_that_is_not_the_base_model_s_is_refused(tmp_path, changes, base, said):
    same = {f"{PREFIX}{module}.base_layer.weight": TABLE.to(torch.bfloat16) for module in ENDS} if changes else {}
    folder = ends(tmp_path, **same | {f"{PREFIX}{name}": tensor for name, tensor in changes.items()})
    with pytest.raises(MllmError, match=re.escape(said)):
        read_adapter(folder, with_ends(**base))


def test_factors_of_an_embedding_that_have_a_linear_s_names_are_refused(tmp_path):
    with pytest.raises(MllmError, match="expected lora_embedding_A and B, got lora_A and B"):
        read_adapter(write_adapter(tmp_path, matrices(ENDS), peft_fields(["embed_tokens", "lm_head"])), with_ends())


def test_all_linears_are_neither_the_embedding_nor_the_head(tmp_path):
    folder = written(tmp_path)
    write_adapter(folder, matrices(SHAPES), peft_fields("all-linear"))
    assert read_adapter(folder, with_ends()).matrices.keys() == BASE.targets.keys()


EXPERTS = {"gate_up_proj": (6, 5), "down_proj": (5, 3)}  # of each of four experts


def experts(folder: Path, wrapped: dict[str, str], count: int = 4, **fields: Any) -> Path:
    """An adapter of experts: parameter → what its module is called in the file."""
    tensors = {}
    for index, (parameter, module) in enumerate(wrapped.items()):
        outputs, inputs = EXPERTS[parameter]
        chance = torch.Generator().manual_seed(index)
        prefix = f"{PREFIX}mlp.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(count * 2, inputs, generator=chance)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, count * 2, generator=chance)
    own = {"target_parameters": [f"experts.{name}" for name in wrapped], "lora_alpha": 2}
    return write_adapter(folder, tensors, peft_fields([], 2) | own | fields)


def with_experts(**changes: Any) -> BaseModel:
    siblings = ("gate_up_proj", "bias", "down_proj")
    stacked = {f"mlp.experts.{name}": StackedExperts(4, siblings) for name in EXPERTS}
    targets = {f"mlp.experts.{name}": shape for name, shape in EXPERTS.items()}
    return BaseModel(**vars(BASE) | {"targets": {**BASE.targets, **targets}, "experts": stacked} | changes)


def test_experts_have_a_pair_of_factors_each_and_the_first_parameter_is_wrapped_within_the_others(tmp_path):
    folder = experts(tmp_path, {"gate_up_proj": "experts.base_layer", "down_proj": "experts"})
    adapter = read_adapter(folder, with_experts())
    assert adapter.rank == 2
    for name, module in {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}.items():
        down, up = adapter.matrices[f"mlp.experts.{name}"]
        tensors = load_file(folder / "adapter_model.safetensors")
        a = tensors[f"{PREFIX}mlp.{module}.lora_A.weight"].reshape(4, 2, -1)
        b = tensors[f"{PREFIX}mlp.{module}.lora_B.weight"].reshape(-1, 2, 4)
        assert torch.allclose(up @ down, torch.einsum("ore,eri->eoi", b, a), atol=1e-6)  # as PEFT's ParamWrapper


@pytest.mark.parametrize(
    ("wrapped", "fields", "said"),
    [
        ({"down_proj": "experts"}, {"count": 5}, "has factors of 10 rows; expected a multiple of the 4 experts"),
        ({"down_proj": "experts"}, {"count": 8}, "mlp.experts.down_proj: expected rank 2, as adapter_config.json says"),
        ({"down_proj": "experts.base_layer"}, {}, "has factors of 2 parameters of mlp.experts; target_parameters"),
        ({"gate_up_proj": "experts"}, {"target_parameters": ["experts.down_proj"]}, "from 5 inputs to 6 outputs"),
        (
            {"down_proj": "experts"},
            {"target_parameters": ["experts.bias"]},
            "target_parameters has 'experts.bias', which is not served",
        ),
        (
            {"down_proj": "other.base_layer"},
            {"target_parameters": None, "target_modules": ["other"]},
            "is a tensor of the base model, or an adapter of a parameter, which",
        ),
        ({"down_proj": "experts"}, {"target_parameters": "experts.down_proj"}, "expected a list of names"),
        (
            {"down_proj": "experts"},
            {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
            "lacks tensors of mlp.experts.gate_up_proj",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, wrapped, fields, said):
    with pytest.raises(MllmError, match=re.escape(said)) as caught:
        read_adapter(experts(tmp_path, wrapped, **fields), with_experts())
    assert "\n" not in str(caught.value)


def dora(folder: Path, **changes: Any) -> Path:
    """An adapter of queries with magnitudes; tensors or fields are others, None: without it."""
    tensors: dict[str, Any] = matrices(QUERIES)
    for index, module in enumerate(QUERIES):
        tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = torch.arange(6.0) * (index + 1)
    fields = peft_fields(["q_proj"], use_dora=True)
    changed = tensors | {f"{PREFIX}{name}": one for name, one in changes.items() if name not in fields}
    given = {name: one for name, one in changed.items() if one is not None}
    return write_adapter(folder, given, fields | {name: one for name, one in changes.items() if name in fields})


def with_dora(**changes: Any) -> BaseModel:
    def read(weight: str, start: int, rows: int) -> torch.Tensor:
        return torch.randn(6, 5, generator=torch.Generator().manual_seed(len(weight)))[start : start + rows]

    return BaseModel(**vars(BASE) | {"takes_dora": True, "read": read} | changes)


def test_magnitudes_over_norms_are_in_the_second_factor_and_beside_it(tmp_path):
    base, tensors = with_dora(), matrices(QUERIES)
    adapter = read_adapter(dora(tmp_path), base)
    for index, module in enumerate(QUERIES):
        down, up, scales = adapter.matrices[f"{module}.weight"]
        change = expected(tensors, module, 2.0)
        norms = (base.read(f"{module}.weight", 0, 6) + change).norm(dim=1)
        assert torch.allclose(scales, torch.arange(6.0) * (index + 1) / norms)
        assert torch.allclose(up @ down, scales[:, None] * change, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "base", "said"),
    [
        ({"use_dora": False}, {}, "has magnitudes of model.layers.0.self_attn.q_proj, and its config no use_dora"),
        ({}, {"takes_dora": False}, "Set lora.dora: true"),
        ({}, {"embedding": "model.layers.0.self_attn.q_proj.weight"}, "expected lora_embedding_A and B"),
        ({}, {"read": lambda *_: None}, "is not stored in rows of numbers, whose norms DoRA needs"),
        ({"model.layers.0.self_attn.q_proj.lora_magnitude_vector": None}, {}, "expected factors and magnitudes of it"),
        ({"other.lora_magnitude_vector": torch.ones(6)}, {}, "other: expected factors and magnitudes of it"),
        (
            {"model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(5)},
            {},
            "model.layers.0.self_attn.q_proj has 5 magnitudes; expected 6",
        ),
        (
            {"model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.full((6,), torch.nan)},
            {},
            "a magnitude over a norm is no number",
        ),
    ],
)
def test_magnitudes_that_do_not_fit_are_refused(tmp_path, changes, base, said):
    with pytest.raises(MllmError, match=re.escape(said)) as caught:
        read_adapter(dora(tmp_path, **changes), with_dora(**base))
    assert "\n" not in str(caught.value)
