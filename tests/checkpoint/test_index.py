"""The index of several weight files: it says which copy of a tensor is read, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.checkpoint.plan import line_on_unlisted, read_checkpoint
from mllm_compile.checkpoint.quantised import CheckpointTensors, read_tensors
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import CheckpointError
from mllm_compile.model.hf_model import build_on_meta
from tests.checkpoint.quantised_folder import random_weight
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.quantised_checkpoints import LINEARS

INDEX = "model.safetensors.index.json"
FILES = [f"model-{number}.safetensors" for number in (1, 2, 3)]
Q = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


def write(folder: Path, weight_map: dict[str, str], *files: dict[str, torch.Tensor]) -> None:
    for name, tensors in zip(FILES, files, strict=False):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def parts(tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors of a small Qwen3, dealt to three files that are not written yet."""
    save_tiny_model(tiny_config("qwen3", tie_word_embeddings=False), tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    return [{name: whole[name] for name in names[first::3]} for first in range(3)]


def listed(parts: list[dict[str, torch.Tensor]]) -> dict[str, str]:
    return {name: file for file, part in zip(FILES, parts, strict=True) for name in part}


def tensors_of(folder: Path) -> CheckpointTensors:
    model = open_model_folder(ModelConfig(path=str(folder)))
    return read_tensors(model.path, model.weight_names, model.scheme, model.weight_map)


def sources(folder: Path) -> dict[str, tuple[str, str]]:
    """Model key → the tensor that fills it, and its file."""
    table = read_checkpoint(tensors_of(folder), build_on_meta(folder, torch.float32).model)
    return {key: (planned.blocks[0].tensor, planned.blocks[0].file) for key, planned in table.items()}


@pytest.mark.parametrize("meant", FILES)
def test_of_copies_in_several_files_the_one_that_the_index_names_is_read(meant, parts, tmp_path):
    for part in parts:
        part[Q] = torch.zeros(64, 64)
    write(tmp_path, {**listed(parts), Q: meant}, *parts)
    assert sources(tmp_path)[Q] == (Q, meant)


@pytest.mark.parametrize("named", [None, FILES[2]])
def test_copies_in_files_that_the_index_does_not_name_are_an_error(named, parts, tmp_path):
    copies = [part | {Q: torch.zeros(64, 64)} for part in parts[:2]] + [parts[2]]
    weight_map = {name: file for name, file in listed(parts).items() if name != Q} | ({Q: named} if named else {})
    copies[2].pop(Q, None)
    write(tmp_path, weight_map, *copies)
    with pytest.raises(CheckpointError, match=rf"'{Q}' is in model-1.* and in model-2.*Name one of them in the index"):
        tensors_of(tmp_path)


def test_what_the_index_does_not_name_is_left_out_where_the_model_has_no_place_for_it(parts, tmp_path):
    weight_map = listed(parts)
    parts[1] |= {"model.layers.7.self_attn.q_proj.weight": torch.zeros(3), "optimiser.step": torch.zeros(1)}
    write(tmp_path, weight_map, *parts)
    assert sources(tmp_path).keys() == weight_map.keys()
    tensors = tensors_of(tmp_path)
    line = line_on_unlisted(tensors, read_checkpoint(tensors, build_on_meta(tmp_path, torch.float32).model))
    assert line is not None and line.startswith("2 tensors of the checkpoint's files, such as 'model.layers.7")


def test_what_the_index_names_and_the_model_has_no_place_for_is_an_error(parts, tmp_path):
    parts[1]["model.layers.7.self_attn.q_proj.weight"] = torch.zeros(3)
    write(tmp_path, listed(parts), *parts)
    with pytest.raises(CheckpointError, match=r"'model.layers.7.self_attn.q_proj.weight' has no place"):
        sources(tmp_path)


@pytest.mark.parametrize("wrong", [None, "model-2.safetensors"])
def test_what_the_index_does_not_name_or_names_wrongly_is_read_where_the_model_needs_it(wrong, parts, tmp_path):
    weight_map = listed(parts)
    file = weight_map.pop(HEAD)
    write(tmp_path, weight_map | ({HEAD: wrong} if wrong else {}), *parts)
    assert sources(tmp_path)[HEAD] == (HEAD, file)


@pytest.mark.parametrize("name", ["gptq", "compressed-tensors fp8 channel", "modelopt fp8", "fp8 blocks"])
def test_parts_of_quantised_weights_that_the_index_does_not_name_are_left_out(name, tmp_path):
    written = LINEARS[name]
    tensors, _ = written.quantise(random_weight(128, 128))
    layer = {f"up{suffix}": tensor for suffix, tensor in tensors.items()}
    stale = {f"gone{suffix}": tensor for suffix, tensor in list(tensors.items())[1:]} | {"up.bias": torch.zeros(128)}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": dict(written.config)}))
    write(tmp_path, {**dict.fromkeys(layer, FILES[0]), "x": FILES[1]}, layer, stale | {"x": torch.zeros(1)})
    planned = tensors_of(tmp_path).planned
    assert "up.weight" in planned and "gone.weight" not in planned


def test_another_choice_of_the_index_is_another_runtime(tmp_path):
    from mllm_compile.compiler.target import find_target
    from tests.tiny_model import TINY, tiny_config

    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    whole = load_file(TINY / "model.safetensors")
    write(folder, {}, whole, {name: torch.zeros_like(value) for name, value in whole.items()})
    first, second, *_ = sorted(whole)
    keys = []
    for file in FILES[:2]:
        weight_map = {**dict.fromkeys(whole, FILES[0]), first: FILES[1], second: file}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        keys.append(find_target(tiny_config(tmp_path / "cache", model={"path": str(folder)})).factors["weight index"])
    assert keys[0] != keys[1]
