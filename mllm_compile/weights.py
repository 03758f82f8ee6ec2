"""Decides, when a model is compiled, which checkpoint tensor fills which weight of the program.

Follows Transformers' own renaming of checkpoint keys, and accounts for every tensor: one that is unexpected, missing or
wrongly shaped is an error that names it. Reading is runtime/weight_loader.py's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.passes.base import PackedPart
from mllm_compile.runtime.safetensors_header import TensorEntry, read_header
from mllm_compile.runtime.weight_loader import WeightPart, WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Tensor:
    file: str
    name: str
    entry: TensorEntry


@dataclass(frozen=True)
class TensorTable:
    """Model key → the checkpoint tensor that holds it."""

    by_model_key: dict[str, _Tensor]
    files: tuple[str, ...]


def plan_weights(
    program_weights: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    packed: Mapping[str, tuple[PackedPart, ...]],
    table: TensorTable | None,
) -> list[WeightSpec]:
    """One spec for each weight of the program.

    Args:
        program_weights: name → shape and dtype of each weight input of the program, constants left out.
        packed: what pack_projections joined.
        table: the checkpoint's tensors, or None for random weights.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    specs = []
    for name, (shape, dtype) in program_weights.items():
        members = packed.get(name, (PackedPart(name, 0, shape[0] if shape else 1),))
        parts = []
        for member in members:
            member_shape = (member.rows, *shape[1:]) if shape else ()
            parts.append(_part(member, member_shape, table))
        specs.append(WeightSpec(name, shape, dtype, tuple(parts)))
    return specs


def _part(member: PackedPart, shape: tuple[int, ...], table: TensorTable | None) -> WeightPart:
    if table is None:
        return WeightPart(member.weight_name, "", member.start, shape)
    tensor = table.by_model_key.get(member.weight_name)
    if tensor is None:
        raise CheckpointError(
            f"the checkpoint lacks {member.weight_name!r} (shape {list(shape)}), which the model needs"
        )
    if tensor.entry.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.entry.shape)}, the model's config.json "
            f"makes it {list(shape)}"
        )
    return WeightPart(tensor.name, tensor.file, member.start, shape)


def read_checkpoint(folder: Path, files: Iterable[str], model: PreTrainedModel) -> TensorTable:
    """Reads the headers of all `files` and gives each tensor its model key.

    Raises:
        CheckpointError: a file is corrupt, a tensor stands in two files, is unexpected, or is missing.
        UnsupportedModelError: Transformers would compute the tensor from others while loading.
    """
    files = tuple(files)
    tensors: dict[str, _Tensor] = {}
    for file in files:
        for name, entry in read_header(folder / file).tensors.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is in {tensors[name].file} and in {file}: which one is meant?")
            tensors[name] = _Tensor(file, name, entry)
    renamed = _rename(tensors, model)
    _account(renamed, model)
    return TensorTable(renamed, files)


def _rename(tensors: dict[str, _Tensor], model: PreTrainedModel) -> dict[str, _Tensor]:
    """Transformers' own mapping from checkpoint keys to model keys; converters that compute are refused by name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms: list[Any] = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    state = model.state_dict()
    renamed: dict[str, _Tensor] = {}
    for name, tensor in tensors.items():
        key, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converter is not None:
            raise UnsupportedModelError(
                f"checkpoint tensor {name!r} is fused or split by Transformers while loading (pattern {converter!r}); "
                "such checkpoints are not supported yet. Save the model once with Transformers' save_pretrained("
                "save_original_format=False) and use that folder."
            )
        if key in renamed:
            raise CheckpointError(f"tensors {renamed[key].name!r} and {name!r} both stand for {key!r}")
        renamed[key] = tensor
    return renamed


def _account(renamed: dict[str, _Tensor], model: PreTrainedModel) -> None:
    """Every tensor has a place, every place a tensor; tied weights may be given under any of their names."""
    state = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_of.setdefault(id(tensor), []).append(name)
    ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
    for key in sorted(set(renamed) - set(state)):
        if _is_known_leftover(key, ignored):
            del renamed[key]
            continue
        raise CheckpointError(
            f"{renamed[key].file}: tensor {renamed[key].name!r} has no place in {type(model).__name__}. "
            "Is this the checkpoint that belongs to the config.json?"
        )
    missing = []
    for names in names_of.values():
        given = [name for name in names if name in renamed]
        if not given:
            missing.append(names[0])
        for name in names:
            if given and name not in renamed:
                renamed[name] = renamed[given[0]]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"the checkpoint lacks {', '.join(repr(name) for name in missing[:3])}{more}")


def _is_known_leftover(key: str, ignored_patterns: tuple[str, ...]) -> bool:
    """Buffers that old checkpoints hold and Transformers computes, and what the model class says to ignore."""
    import re

    return key.endswith(("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")) or any(
        re.search(pattern, key) for pattern in ignored_patterns
    )
