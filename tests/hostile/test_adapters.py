"""Hostile folders of adapters: each is read, or refused in one line; what is read has the shapes of the model."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile.adapters.base_model import BaseModel, StackedExperts
from mllm_compile.adapters.peft_config import CONFIG_FILE
from mllm_compile.adapters.peft_folder import TENSOR_FILE, read_adapter
from mllm_compile.errors import MllmError
from tests.adapters.folders import PREFIX, matrices, peft_fields, write_adapter
from tests.hostile.makers import JSON_NASTY, damaged_bytes, damaged_text
from tests.hostile.seeds import cases, repeat_with

SHAPES = {f"model.layers.{layer}.self_attn.{name}_proj": (6, 5) for layer in range(2) for name in "qv"}
TABLE = torch.arange(35.0).view(7, 5)
_ENDS = {"embed_tokens": (5, 7), "lm_head": (7, 5)}
_EXPERTS = {"experts.up": (6, 5), "experts.down": (5, 3)}  # of each of two
_TARGETS = {f"{one}.weight": shape for one, shape in (SHAPES | _ENDS).items()} | _EXPERTS
BASE = BaseModel(
    *("m", _TARGETS, SHAPES | _ENDS, {}, 8, torch.float32, "embed_tokens.weight", "lm_head.weight"),
    experts=dict.fromkeys(_EXPERTS, StackedExperts(2, ("up", "down"))),
    read=lambda _, start, rows: TABLE[start : start + rows],
    takes_dora=True,
)


def tensors_of_experts() -> dict[str, torch.Tensor]:
    names = {"experts.up": "experts.base_layer", "experts.down": "experts"}
    return matrices({names[one]: shape for one, shape in _EXPERTS.items()}, 8)


def tensors_of_ends() -> dict[str, torch.Tensor]:
    """Of an embedding and a head, with a copy of it."""
    tensors = matrices(_ENDS)
    names = {f"embed_tokens.lora_{half}.weight": f"embed_tokens.lora_embedding_{half}" for half in "AB"}
    found = {f"{PREFIX}{new}": tensors.pop(f"{PREFIX}{old}") for old, new in names.items()}
    return tensors | found | {f"{PREFIX}lm_head.base_layer.weight": TABLE}


_PATTERNS = ["(", "(a+)+$", ".*", "[", "(?i)q", "q_proj|v_proj", "\\", "(?P<x>a)(?P=x)", "a{99}{99}{99}", "\ud800"]


def changed_config(chance: random.Random, fields: dict[str, Any]) -> bytes:
    """The config, damaged, or with another value or pattern of one key."""
    kind = chance.randrange(3)
    if kind == 0:
        return damaged_text(chance, fields)
    value = chance.choice(JSON_NASTY) if kind == 1 else chance.choice(_PATTERNS)
    key = chance.choice(["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", *fields])
    if "pattern" in key and kind == 2:
        value = {value: chance.choice([1, 4, 0.5])}
    return json.dumps(fields | {key: value}).encode()


def changed_tensors(chance: random.Random, whole: bytes) -> bytes:
    """The tensors, with damaged bytes, or behind a damaged header."""
    if chance.random() < 0.4:
        return damaged_bytes(chance, whole)
    (length,) = struct.unpack("<Q", whole[:8])
    header = damaged_text(chance, json.loads(whole[8 : 8 + length]))
    return struct.pack("<Q", len(header)) + header + whole[8 + length :]


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.slow)], ids=["some", "many"])
def test_adapters(count: int, tmp_path: Path) -> None:
    parameters = ["experts.up", "experts.down"]
    fields = peft_fields(
        ["q_proj", "v_proj", "embed_tokens", "lm_head"],
        target_parameters=parameters,
        rank_pattern={r"layers\.1\..*": 4},
    )
    whole = write_adapter(tmp_path, matrices(SHAPES) | tensors_of_ends() | tensors_of_experts(), fields) / TENSOR_FILE
    kinds = [(fields, whole.read_bytes())]
    magnitudes = {f"{PREFIX}{module}.lora_magnitude_vector": torch.ones(6) for module in SHAPES}
    of_dora = peft_fields(["q_proj", "v_proj"], use_dora=True)
    write_adapter(tmp_path, matrices(SHAPES) | magnitudes, of_dora)
    kinds.append((of_dora, whole.read_bytes()))
    num_read = 0
    for number, chance in cases("adapters", count):
        fields, tensors = chance.choice(kinds)
        try:
            (tmp_path / CONFIG_FILE).write_bytes(
                changed_config(chance, fields) if chance.random() < 0.6 else json.dumps(fields).encode()
            )
            whole.write_bytes(changed_tensors(chance, tensors) if chance.random() < 0.5 else tensors)
            adapter = read_adapter(tmp_path, BASE)
        except MllmError as error:
            assert "\n" not in str(error) and len(str(error)) < 4000
            str(error).encode()
        except BaseException as error:
            error.add_note(repeat_with("adapters", number))
            raise
        else:
            num_read += 1
            for weight, (down, up, *scales) in adapter.matrices.items():
                assert (up @ down).shape[-2:] == BASE.targets[weight]
                assert all(torch.isfinite(one).all() for one in (down, up, *scales))
    assert count // 20 < num_read < count
