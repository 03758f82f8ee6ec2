"""The tensors of a folder's safetensors files, for an update: read one by one, headers checked before any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from mllm_compile.errors import CheckpointError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.runtime.files.regular_file import open_regular
from mllm_compile.runtime.weights.safetensors_header import read_safetensors
from mllm_compile.runtime.weights.tensor_entry import TensorEntry

_SUFFIX, _INDEX = ".safetensors", "model.safetensors.index.json"
_MOST_FILES = 4096


def tensors_of_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its name in the files; what an index names, where there is one.

    Raises:
        CheckpointError: there are no such files, one is damaged, or two hold a tensor and no index says which counts.
    """
    paths = sorted(path for path in folder.glob(f"*{_SUFFIX}"))[:_MOST_FILES] if folder.is_dir() else []
    if not paths:
        raise CheckpointError(f"{folder}: expected a folder with safetensors files. Write the weights there first.")
    index = _index(folder)
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for path in paths:
        for name, entry in read_safetensors(path).tensors.items():
            if index.get(name, path.name) != path.name:
                continue
            if name in found:
                raise CheckpointError(f"{path}: tensor {name!r} is in {found[name][0].name} too. Keep one of them.")
            found[name] = path, entry
    return _read(found)


def _index(folder: Path) -> dict[str, str]:
    content = read_json_object(folder / _INDEX, CheckpointError)
    if content is None:
        return {}
    names = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{folder / _INDEX}: expected a weight_map of names and files. Write it again.")
    return names


def _read(found: dict[str, tuple[Path, TensorEntry]]) -> Iterator[tuple[str, torch.Tensor]]:
    of_files: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for name, (path, entry) in found.items():
        of_files.setdefault(path, []).append((name, entry))
    for path, tensors in of_files.items():
        try:
            with open(open_regular(path), "rb") as file:
                for name, entry in sorted(tensors, key=lambda one: one[1].begin):
                    data = bytearray(entry.end - entry.begin)
                    file.seek(entry.begin)
                    if file.readinto(data) != len(data):
                        raise CheckpointError(f"{path} ends amid tensor {name!r}. Write it again.")
                    flat = torch.frombuffer(data, dtype=entry.dtype) if data else torch.empty(0, dtype=entry.dtype)
                    yield name, flat.view(entry.shape)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
