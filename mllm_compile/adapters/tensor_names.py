"""The tensors of an adapter's file: two of each module, in PEFT's names, and its copies of the base model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.runtime.lora.turns import in_turns
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.tensor_entry import TensorEntry

PREFIX = "base_model.model."
_PAIRS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
_MAGNITUDES = ".lora_magnitude_vector"
_COPY = ".base_layer.weight"  # beside factors of embeddings and heads
_MOST_OF_NAME = 500  # characters of a module's name, which messages have
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of names of tensors that are not served.
_OTHERS = {
    ".bias": "a bias",
    ".modules_to_save": "a whole module that was trained",
    ".trainable_tokens_": "rows of an embedding that were trained",
}


class Factors(NamedTuple):
    """The places of a module's two factors in the file: A [rows, inputs], B [outputs, rows].

    Attributes:
        is_embedding: they have an embedding's names.
        num_experts: so many have as many rows each.
    """

    down: TensorEntry
    up: TensorEntry
    is_embedding: bool
    num_experts: int = 1

    @property
    def rows(self) -> int:
        return self.down.shape[0]

    @property
    def rank(self) -> int:
        return self.rows // self.num_experts


class AdapterFile(NamedTuple):
    """The tensors of a file by the modules that they are of.

    Attributes:
        factors: of each module that it changes.
        copies: of the base model's weights that lie beside them.
        magnitudes: DoRA's, one of each output.
    """

    factors: dict[str, Factors]
    copies: dict[str, TensorEntry]
    magnitudes: dict[str, TensorEntry]


def tensors_of(tensors: Mapping[str, TensorEntry], path: Path) -> AdapterFile:
    """The tensors by module; ranks of two factors agree.

    Args:
        path: the file, for messages.

    Raises:
        UnsupportedModelError: a tensor is of something that is not served.
        CheckpointError: a name, a type or a shape is not an adapter's, or one of two factors is missing.
    """
    found: dict[str, dict[str, TensorEntry]] = {suffix: {} for suffix in (*_PAIRS[0], *_PAIRS[1], _COPY, _MAGNITUDES)}
    for name, entry in in_turns(tensors.items()):
        suffix = next((one for one in found if name.endswith(one)), None)
        module = name.removeprefix(PREFIX).removesuffix(suffix or "")
        is_known = suffix is not None and name.startswith(PREFIX) and 0 < len(module) <= _MOST_OF_NAME
        _check_name(name if suffix != _COPY else module, path, is_known)
        dims, kind = (1, "vector") if suffix == _MAGNITUDES else (2, "matrix")
        if entry.dtype not in _DTYPES or len(entry.shape) != dims or 0 in entry.shape:
            raise CheckpointError(
                f"{path}: {short_repr(name)} is {_shown(entry)}; expected a {kind} in float32, bfloat16 or float16"
            )
        found[suffix or _COPY][module] = entry
    factors: dict[str, Factors] = {}
    for a, b in _PAIRS:
        _check_pairs(found[a], found[b], (a, b), path)
        factors |= {module: Factors(down, found[b][module], a != _PAIRS[0][0]) for module, down in found[a].items()}
    if not factors:
        raise CheckpointError(f"{path} holds no tensor of an adapter. Download it again")
    return AdapterFile(factors, found[_COPY], found[_MAGNITUDES])


def _check_pairs(
    downs: Mapping[str, TensorEntry], ups: Mapping[str, TensorEntry], suffixes: tuple[str, str], path: Path
) -> None:
    if odd := sorted(downs.keys() ^ ups.keys()):
        missing = suffixes[1] if odd[0] in downs else suffixes[0]
        raise CheckpointError(
            f"{path} has one of the two factors of {odd[0]}, and lacks {PREFIX}{odd[0]}{missing}. Download it again"
        )
    for module, down in downs.items():
        if down.shape[0] != ups[module].shape[1]:
            raise CheckpointError(
                f"{path}: {module}: A is {list(down.shape)} and B is {list(ups[module].shape)}; expected one rank"
            )


def _check_name(name: str, path: Path, is_known: bool) -> None:
    other = next((what for part, what in _OTHERS.items() if part in name), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{path}: {short_repr(name)} is {other}, which is not served; A and B are. Merge the "
            "adapter into its model instead"
        )
    if not is_known:
        raise CheckpointError(
            f"{path}: {short_repr(name)} is no tensor of an adapter; expected names such as {PREFIX}….q_proj."
            "lora_A.weight, as PEFT's save_pretrained writes them"
        )


def _shown(entry: TensorEntry) -> str:
    return f"{str(entry.dtype).removeprefix('torch.')} of shape {list(entry.shape)}"
