"""The tensors of a folder's safetensors files, for an update: read in parts, headers checked before any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch

from mllm_compile.errors import CheckpointError, DeviceMemoryError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.runtime.weights.safetensors_header import read_safetensors
from mllm_compile.runtime.weights.stream import TensorRead, stream_tensors
from mllm_compile.runtime.weights.tensor_entry import TensorEntry

_SUFFIX, _INDEX, _ADAPTER = ".safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
_MOST_FILES = 4096
_PART_BYTES = 512 << 20  # beside the weights at once, unless a tensor alone has more


def tensors_of_folder(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its name in the files, on a device.

    An index says which files count, as in vLLM and SGLang; without one all do but an adapter's, as PEFT writes it.

    Raises:
        CheckpointError: there are no such files or too many, one is damaged or missing, or two hold a tensor and no
            index says which counts.
    """
    index = _index(folder)
    paths = _files(folder, set(index.values()))
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for path in paths:
        for name, entry in read_safetensors(path).tensors.items():
            if index.get(name, path.name) != path.name:
                continue
            if name in found:
                raise CheckpointError(f"{path}: tensor {name!r} is in {found[name][0].name} too. Keep one of them.")
            found[name] = path, entry
    return _read(found, device)


def _files(folder: Path, named: Set[str]) -> list[Path]:
    paths = {path.name: path for path in folder.glob(f"*{_SUFFIX}")} if folder.is_dir() else {}
    adapter = paths.pop(_ADAPTER, None) if _ADAPTER not in named else None
    if missing := sorted(named - paths.keys()):
        raise CheckpointError(f"{folder} lacks {missing[0]!r}, which {_INDEX} names. Write it first.")
    if not paths:
        instead = "" if adapter is None else f" {_ADAPTER} is an adapter's: load it as one."
        raise CheckpointError(
            f"{folder}: expected a folder with safetensors files of weights. Write them there first.{instead}"
        )
    counted = sorted(named or paths)
    if len(counted) > _MOST_FILES:
        raise CheckpointError(
            f"{folder} has weights in {len(counted):,} files; expected {_MOST_FILES:,} at most. Write larger files."
        )
    return [paths[name] for name in counted]


def _index(folder: Path) -> dict[str, str]:
    content = read_json_object(folder / _INDEX, CheckpointError)
    if content is None:
        return {}
    names = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{folder / _INDEX}: expected a weight_map of names and files. Write it again.")
    return names


def _read(found: Mapping[str, tuple[Path, TensorEntry]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, as many at once as fit in a part, in the order of the files' bytes."""
    part: list[tuple[str, TensorRead]] = []
    size = 0
    for name, (path, entry) in sorted(found.items(), key=lambda one: (one[1][0], one[1][1].begin)):
        num_bytes = entry.end - entry.begin
        if part and size + num_bytes > _PART_BYTES:
            yield from _brought(part, device)
            part, size = [], 0
        part.append((name, TensorRead(path, entry, _place(entry, device))))
        size += num_bytes
    yield from _brought(part, device)


def _place(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"there is no room for {entry.end - entry.begin:,} bytes of a folder beside the weights that serve. Leave "
            "more memory free by a smaller runtime.mem_fraction_static."
        ) from error


def _brought(part: Sequence[tuple[str, TensorRead]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    stream_tensors([read for _, read in part if read.place.numel()], device)
    for name, read in part:
        yield name, read.place
