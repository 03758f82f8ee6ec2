"""Changes of tensors that converters to GGUF make, and that views alone do not undo.

Tensors are plain, or of any block type: a number of the weight then says which, by the tensor's role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.weights.formats.base import (
    VALUES,
    Format,
    Numbers,
    Roles,
    Stored,
    StoredTensor,
    Tensors,
    misfit,
)
from mllm_compile.runtime.weights.formats.gguf import decoded_rows, format_of
from mllm_compile.runtime.weights.formats.settings import Settings
from mllm_compile.runtime.weights.gguf_header import BLOCK_TYPES, BlockType

UP = "up"
_TYPE_KEYS = {VALUES: "type", UP: "up_type"}  # of numbers
_NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}


def type_numbers(kinds: Mapping[str, BlockType]) -> dict[str, int]:
    """The numbers of the block types of a weight's tensors, by role."""
    return {_TYPE_KEYS[role]: _NUMBERS[kind.name] for role, kind in kinds.items() if kind.dtype is None}


def _kind(numbers: Numbers, role: str) -> BlockType | None:
    """The block type of a tensor; None: it is plain."""
    return BLOCK_TYPES[int(numbers[key])] if (key := _TYPE_KEYS[role]) in numbers else None


def _shape(tensor: StoredTensor, numbers: Numbers, role: str) -> tuple[int, ...]:
    """The shape of a tensor's numbers.

    Raises:
        CheckpointError: it is not of the type that the numbers say.
    """
    key = _TYPE_KEYS[role]
    if key not in numbers and tensor.dtype.is_floating_point:
        return tensor.shape
    kind = BLOCK_TYPES.get(int(numbers.get(key, -1)))
    if kind is None or kind.dtype is not None or tensor.dtype != torch.uint8 or tensor.shape[-1] % kind.num_bytes:
        raise CheckpointError(f"{tensor.file}: {tensor} is not of the block type {numbers.get(key)}")
    return (*tensor.shape[:-1], tensor.shape[-1] // kind.num_bytes * kind.block)


def _rows(tensors: Tensors, numbers: Numbers, role: str, rows: slice | torch.Tensor) -> torch.Tensor:
    chosen = tensors[role][rows]
    kind = _kind(numbers, role)
    return chosen.float() if kind is None else decoded_rows(chosen, kind)


class _Changed(Format):
    plain = ""
    roles: ClassVar[Roles] = {VALUES: ""}
    values_dtypes = tuple({kind.dtype or torch.uint8 for kind in BLOCK_TYPES.values()})


class _Computed(_Changed):
    """A tensor that was stored as a function of itself; `undo` is the inverse."""

    def __init__(self, name: str, undo: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name = name  # type: ignore[misc]  # an instance a function
        self._undo = undo

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        return _shape(stored[VALUES], details, VALUES), dict(details)

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        return self._undo(_rows(tensors, numbers, VALUES, slice(start, stop)))


class _Gates(_Changed):
    """[E, 2 I, …]: rows of each expert's gate and up, [E, I, …] each, by turns, as gpt-oss has them."""

    def __init__(self, suffix: str) -> None:
        self.name = f"gguf {suffix}s of gate and up apart"  # type: ignore[misc]  # an instance a suffix
        self.roles = {VALUES: f"gate_exps.{suffix}", UP: f"up_exps.{suffix}"}  # type: ignore[misc]

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        gate, up = stored[VALUES], stored[UP]
        shape, other = _shape(gate, details, VALUES), _shape(up, details, UP)
        if shape != other or len(shape) < 2:
            raise misfit(up, gate, f"gate has {list(shape)} numbers, up {list(other)}")
        return (shape[0], 2 * shape[1], *shape[2:]), dict(details)

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        return _by_turns(*(_rows(tensors, numbers, role, slice(start, stop)) for role in (VALUES, UP)))

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        kind = _kind(numbers, VALUES)
        if kind is None or kind is not _kind(numbers, UP) or len(shape) < 3:
            return None
        return format_of(kind).scheme(stored, shape, {})

    def sources(self, role: str) -> tuple[str, ...]:
        return (VALUES, UP)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        kind = _kind(numbers, VALUES)
        assert kind is not None, "plain tensors have no scheme"
        return _by_turns(*(format_of(kind).kept_tensor(role, {VALUES: tensors[part]}, {}) for part in (VALUES, UP)))


def _by_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack((gate, up), 2).flatten(1, 2)


class _Groups(_Changed):
    """[G * (Q + 2) * D, …]: each of G groups has Q heads of queries, one of keys and one of values, of D rows each; the
    file has the queries of all groups, then the keys, then the values. Bloom and Falcon have them so."""

    name = "gguf queries, keys and values apart"

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values = stored[VALUES]
        shape = _shape(values, details, VALUES)
        heads = int(details["groups"]) * (int(details["queries"]) + 2)
        if shape[0] % heads:
            raise CheckpointError(f"{values.file}: {values} has {shape[0]} rows for {heads} heads. Download it again.")
        return shape, dict(details)

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        groups, queries = int(numbers["groups"]), int(numbers["queries"])
        width = len(tensors[VALUES]) // groups // (queries + 2)
        row = torch.arange(start, stop, device=tensors[VALUES].device)
        group, place = row // (width * (queries + 2)), row % (width * (queries + 2))
        kind = place // width - queries  # below 0: queries, 0: keys, 1: values
        of_shared = (groups * (queries + kind) + group) * width + place % width
        return _rows(tensors, numbers, VALUES, torch.where(kind < 0, group * width * queries + place, of_shared))


PLUS_ONE = _Computed("gguf norms with one added", lambda rows: rows - 1)
NEGATED_EXPONENTIALS = _Computed("gguf negated exponentials", lambda rows: torch.log(-rows))
GATES = {suffix: _Gates(suffix) for suffix in ("weight", "bias")}
GROUPS = _Groups()
GGUF_CHANGES = (PLUS_ONE, NEGATED_EXPONENTIALS, *GATES.values(), GROUPS)
