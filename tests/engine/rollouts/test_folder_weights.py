"""The files of a folder that an update reads, and the tensors of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile.engine.rollouts import folder_weights
from mllm_compile.engine.rollouts.folder_weights import tensors_of_folder
from mllm_compile.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def write(folder: Path, index: dict[str, str] | None = None, **files: str) -> Path:
    """Files with a tensor for each letter, whose number says the file's place."""
    for place, (file, names) in enumerate(files.items()):
        save_file({name: torch.tensor([float(place)]) for name in names}, folder / f"{file}.safetensors")
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def read(folder: Path) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in tensors_of_folder(folder, torch.device("cpu"))}


def test_all_files_count_but_an_adapters(tmp_path):
    assert read(write(tmp_path, model="ab", rest="c", adapter_model="x")) == {"a": 0, "b": 0, "c": 1}


def test_an_index_says_which_files_count_and_whose_tensor(tmp_path):
    index = {"a": "one.safetensors", "b": "two.safetensors"}
    assert read(write(tmp_path, index, one="ab", two="bc", consolidated="abc")) == {"a": 0, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("index", "files", "said"),
    [
        (None, {}, "expected a folder with safetensors files of weights. Write them there first.$"),
        (None, {"adapter_model": "x"}, "adapter_model.safetensors is an adapter's: load it as one"),
        (None, {"one": "a", "two": "a"}, "tensor 'a' is in one.safetensors too. Keep one of them"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, {"one": "a"}, f"lacks 'two.safetensors', which {INDEX}"),
        ({"a": "../model.safetensors"}, {"one": "a"}, r"lacks '\.\./model.safetensors'"),
        ({"a": 3}, {"one": "a"}, "expected a weight_map of names and files"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, index, files, said):
    write(tmp_path, index, **files)
    save_file({"a": torch.ones(1)}, tmp_path.parent / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path)


def test_too_many_files_are_refused_and_none_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_weights, "_MOST_FILES", 2)
    assert read(write(tmp_path, one="a", two="b")) == {"a": 0, "b": 1}
    write(tmp_path, three="c")
    with pytest.raises(CheckpointError, match=r"weights in 3 files; expected 2 at most\. Write larger files"):
        read(tmp_path)
    assert read(write(tmp_path, {"a": "one.safetensors", "c": "three.safetensors"})) == {"a": 0, "c": 0}
