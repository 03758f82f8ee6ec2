"""The weights of a program and what fills them, part by part: the compiler decides it, loader.py does it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.formats.base import VALUES, Quantised, StoredTensor
from mllm_compile.runtime.weights.formats.registry import is_stored, kept_sources
from mllm_compile.runtime.weights.header import entry_of, read_bytes
from mllm_compile.runtime.weights.tensor_entry import WeightHeader
from mllm_compile.runtime.weights.views import DAMAGED, ViewStep, rows_first, view_shape


@dataclass(frozen=True)
class QuantisedPart:
    """The tensor of a weight's scheme that a part is: one of the checkpoint's own, where it is quantised, else of the
    weight quantised while it is read."""

    role: str
    scheme: WeightScheme

    def steps(self, steps: Iterable[ViewStep]) -> tuple[ViewStep, ...]:
        """The views of this tensor; `steps` are the weight's views, parts of its inputs are of dimension -1."""
        return tuple(
            ("narrow", -1, *self.scheme.stretch(self.role, int(step[2]), int(step[3])))
            if step[:2] == ("narrow", -1)
            else step
            for step in steps
        )


@dataclass(frozen=True)
class Factor:
    """A scale of the checkpoint, of one number, that a weight is multiplied with, or divided by, as the next power of
    two: no digit of the weight changes."""

    tensor: StoredTensor
    is_divided: bool

    def value(self, folder: Path, headers: Mapping[str, WeightHeader]) -> float:
        """Raises CheckpointError if it is not a positive number."""
        one = self.tensor
        entry = entry_of(folder, headers, one.file, one.name, one.shape, one.dtype)
        number = torch.frombuffer(bytearray(read_bytes(folder / one.file, entry)), dtype=one.dtype).item()
        if not 0 < number < math.inf:
            raise CheckpointError(
                f"{folder / one.file}: {one.name!r}: expected a positive number, as the scale of a KV cache, found "
                f"{number}. Fetch the checkpoint again, or set compile.disable_passes: [scale_keys_and_values]."
            )
        return self.power_of(number)

    def power_of(self, number: float) -> float:
        """The number that the weight is multiplied by where the scale is this positive one."""
        part, exponent = math.frexp(number)
        power = math.ldexp(1.0, exponent - 1 if part == 0.5 else exponent)
        return 1 / power if self.is_divided else power


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint tensor and the box of the weight that it fills.

    Attributes:
        tensor: its name in the checkpoint.
        file: the safetensors file that holds it, relative to the model folder; "" for random weights.
        start: the box's first row in dimension 0; how many there are follows from the shape.
        shape: the tensor's own shape.
        steps: views to take of the tensor, in order, before it is copied.
        inner_starts: where the box begins in dimensions 1, 2, …; empty for all of each.
        quantised: the tensors that the weight is computed from, `tensor` the one of its values; `shape` is what they
            make. None: it is stored as it is.
        kept: the tensor of its scheme that the box gets of the weight; None: the weight itself.
        factor: what is multiplied into it; None: nothing is.
    """

    tensor: str
    file: str
    start: int
    shape: tuple[int, ...]
    steps: tuple[ViewStep, ...] = ()
    inner_starts: tuple[int, ...] = ()
    quantised: Quantised | None = None
    kept: QuantisedPart | None = None
    factor: Factor | None = None

    @property
    def is_quantised_here(self) -> bool:
        """True if the checkpoint has it as it is, and memory is to have it quantised."""
        return self.kept is not None and self.quantised is None

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The tensors that a quantised weight, or what is wanted of it, is computed from."""
        if self.quantised is None:
            return ()
        tensors = self.quantised.tensors
        if self.kept is None:
            return tuple(tensors.values())
        return tuple(tensors[role] for role in kept_sources(self.quantised, self.kept.role))

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The bytes that are read for it; a plain tensor counts as one of `dtype`."""
        if self.quantised is not None and self.kept is not None and is_stored(self.quantised, self.kept.role):
            (source,) = self.sources
            return _num_read(source.shape, self.kept.steps(self.steps)) * source.dtype.itemsize
        if self.quantised is not None:
            return sum(tensor.num_bytes for tensor in self.sources)
        if self.kept is not None:  # of the tensors that are made of one, the values count
            return 2 * _num_read(self.shape, rows_first(self.steps)[0]) if self.kept.role == VALUES else 0
        return _num_read(self.shape, self.steps) * dtype.itemsize


def _num_read(shape: tuple[int, ...], steps: tuple[ViewStep, ...]) -> int:
    """Numbers that are read of a tensor: of one whose first view is a part of it, no others."""
    is_part = bool(steps) and steps[0][0] == "narrow"
    return math.prod(view_shape(shape, steps[:1]) if is_part else shape)


@dataclass(frozen=True)
class WeightSpec:
    """One weight of the program.

    Attributes:
        name, shape, dtype: its place.
        parts: the checkpoint tensors that fill it, in row order. What they leave of a vector is zeros.
        byte_sum: sums.py's sum of its bytes; None where the checkpoint may be another one of the same shapes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[WeightPart, ...]
    byte_sum: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_zeros(self) -> bool:
        """True for a vector that its parts leave some of: of linears without a bias beside others with one."""
        if len(self.shape) != 1:
            return False
        shapes = (view_shape(part.shape, part.steps) if part.steps else part.shape for part in self.parts)
        return sum(map(math.prod, shapes)) < self.shape[0]

    @property
    def num_bytes_read(self) -> int:
        """The bytes of files that fill it, other dtypes left aside."""
        return sum(part.num_bytes(self.dtype) for part in self.parts)


def place_of(weight: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """The view of `weight` that `part` fills.

    Raises:
        CheckpointError: it has no such part.
    """
    shape = view_shape(part.shape, part.steps) if part.steps else part.shape
    if part.kept is not None:
        shape = part.kept.scheme.shape(part.kept.role, *shape)
    starts = (part.start, *part.inner_starts)
    starts += (0,) * (len(shape) - len(starts))  # no inner starts: all of those dimensions
    is_within = len(shape) == weight.dim() and all(
        0 <= start <= whole - size for start, size, whole in zip(starts, shape, weight.shape, strict=False)
    )
    if not is_within:
        raise CheckpointError(
            f"tensor {part.tensor!r}: a weight of shape {list(weight.shape)} has no place for {list(shape)} that "
            f"begins at {short_repr(starts)}: the table of weights {DAMAGED}"
        )
    for dim, (start, size) in enumerate(zip(starts, shape, strict=False)):  # a scalar has none
        weight = weight.narrow(dim, start, size)
    return weight
