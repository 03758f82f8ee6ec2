"""The tensors of an adapter's file: two of each module, in PEFT's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.tensor_entry import TensorEntry

PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MOST_OF_NAME = 500  # characters of a module's name, which messages have
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of names of tensors that are not served.
_OTHERS = {
    ".lora_embedding_": "an adapter of an embedding",
    ".lora_magnitude_vector": "DoRA",
    ".bias": "a bias",
    ".modules_to_save": "a whole module that was trained",
    ".base_layer.": "a tensor of the base model, or an adapter of a parameter",
    ".trainable_tokens_": "rows of an embedding that were trained",
}


class Factors(NamedTuple):
    """The places of a module's two factors in the file: A [rank, inputs], B [outputs, rank]."""

    down: TensorEntry
    up: TensorEntry

    @property
    def rank(self) -> int:
        return self.down.shape[0]


def factors_of(tensors: Mapping[str, TensorEntry], path: Path) -> dict[str, Factors]:
    """The factors of each module that the file names; ranks of the two agree.

    Args:
        path: the file, for messages.

    Raises:
        UnsupportedModelError: a tensor is of something that is not served.
        CheckpointError: a name, a type or a shape is not an adapter's, or one of two factors is missing.
    """
    halves: dict[str, dict[str, TensorEntry]] = {_A: {}, _B: {}}
    for name, entry in tensors.items():
        suffix = next((one for one in halves if name.endswith(one)), None)
        module = name.removeprefix(PREFIX).removesuffix(suffix or "")
        is_known = suffix is not None and name.startswith(PREFIX) and 0 < len(module) <= _MOST_OF_NAME
        _check_name(name, path, is_known)
        if entry.dtype not in _DTYPES or len(entry.shape) != 2 or 0 in entry.shape:
            raise CheckpointError(
                f"{path}: {short_repr(name)} is {_shown(entry)}; expected a matrix in float32, bfloat16 or float16"
            )
        halves[suffix or _A][module] = entry
    if odd := sorted(halves[_A].keys() ^ halves[_B].keys()):
        missing = _B if odd[0] in halves[_A] else _A
        raise CheckpointError(
            f"{path} has one of the two factors of {odd[0]}, and lacks {PREFIX}{odd[0]}{missing}. Download it again"
        )
    if not halves[_A]:
        raise CheckpointError(f"{path} holds no tensor of an adapter. Download it again")
    factors = {module: Factors(down, halves[_B][module]) for module, down in halves[_A].items()}
    for module, (down, up) in factors.items():
        if down.shape[0] != up.shape[1]:
            raise CheckpointError(
                f"{path}: {module}: A is {list(down.shape)} and B is {list(up.shape)}; expected one rank"
            )
    return factors


def _check_name(name: str, path: Path, is_known: bool) -> None:
    other = next((what for part, what in _OTHERS.items() if part in name), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{path}: {short_repr(name)} is {other}, which is not served; A and B of linears are. Merge the "
            "adapter into its model instead"
        )
    if not is_known:
        raise CheckpointError(
            f"{path}: {short_repr(name)} is no tensor of an adapter; expected names such as {PREFIX}….q_proj{_A}, as "
            "PEFT's save_pretrained writes them"
        )


def _shown(entry: TensorEntry) -> str:
    return f"{str(entry.dtype).removeprefix('torch.')} of shape {list(entry.shape)}"
