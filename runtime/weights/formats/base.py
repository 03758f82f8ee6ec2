"""Defines a format of quantised weights: the tensors that hold one weight, its shape, its rows as plain numbers.

Shapes: N outputs, K inputs of a linear, G groups of inputs that share a scale. All of it is plain torch on the tensors'
device, without a look at their values. A place that points nowhere becomes NaN, which the loader refuses by the
weight's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.weights.formats.settings import Settings

VALUES = "values"  # the role of the tensor that holds a weight's numbers; the rest are scales and the like


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, which is relative to the model folder."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name!r} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Quantised:
    """How one weight is stored.

    Attributes:
        format: the format's name.
        tensors: by role.
        numbers: sizes and settings that the format needs.
    """

    format: str
    tensors: Mapping[str, StoredTensor]
    numbers: Mapping[str, int | float]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


Roles = Mapping[str, str]
Stored = Mapping[str, StoredTensor]
Tensors = Mapping[str, torch.Tensor]
Numbers = Mapping[str, int | float]
ReadBytes = Callable[[StoredTensor], bytes]


class Format:
    """A format; it has no state.

    Attributes:
        name: what specs and messages call it.
        plain: how the weight's name ends where it is not quantised.
        roles: role → how the name of that tensor ends in its place.
        optional: roles that a weight may lack.
        values_dtypes: of the tensor of values; another dtype means another format.
        transposed: the model has the last two dimensions the other way round.
        as_stored: roles whose tensors equal the scheme's to the byte.
    """

    name: ClassVar[str]
    plain: ClassVar[str]
    roles: ClassVar[Roles]
    optional: ClassVar[frozenset[str]] = frozenset()
    values_dtypes: ClassVar[tuple[torch.dtype, ...]]
    transposed: ClassVar[bool] = False
    as_stored: ClassVar[frozenset[str]] = frozenset()

    def details(self, stored: Stored, read: ReadBytes) -> Numbers:
        """Numbers that are in the data of a small tensor; the loader compares them with the plan's.

        Raises:
            CheckpointError: it holds something else.
        """
        return {}

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        """The weight's shape, and the numbers that `rows` needs.

        Raises:
            CheckpointError: the tensors do not fit together; it names both.
        """
        raise NotImplementedError

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        """The weight's rows [start, stop) of dimension 0; `start` is a multiple of 128 where it has two dimensions."""
        raise NotImplementedError

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        """The scheme in which the weight can be in memory; None: it is dequantised."""
        return None

    def sources(self, role: str) -> tuple[str, ...]:
        """Roles here of the tensors that the scheme's tensor of this role is made of, the first its own."""
        return (role,)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        """The scheme's tensor of this role, or what is broadcast to it, from its `sources`; of any dtype that holds its
        numbers."""
        raise NotImplementedError


def lacks(values: StoredTensor, missing: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{values.file}: {values} is a weight as {why}; the checkpoint lacks {missing!r}, which goes with it. Download "
        "the checkpoint again."
    )


def misfit(one: StoredTensor, other: StoredTensor, why: str) -> CheckpointError:
    return CheckpointError(f"{one.file}: {one} and {other} do not fit together: {why}")


def check_dtype(tensor: StoredTensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(f"{tensor.file}: {tensor}: expected {names}")


def check_dims(tensor: StoredTensor, *dims: int) -> None:
    if len(tensor.shape) not in dims:
        raise CheckpointError(f"{tensor.file}: {tensor}: expected {' or '.join(map(str, dims))} dimensions")


def check_shape(tensor: StoredTensor, shape: tuple[int, ...], beside: StoredTensor) -> None:
    if tensor.shape != shape:
        raise misfit(tensor, beside, f"expected {list(shape)} of the former")


def group_size(stored: Stored, sizes: tuple[int, ...], num_inputs: int, num_groups: int) -> int:
    """The one of `sizes` that divides `num_inputs` into `num_groups`; 0 or less means all inputs.

    Raises:
        CheckpointError: none does, or it cannot be told which.
    """
    known = {size if size > 0 else max(num_inputs, 1) for size in sizes}
    fits = {size for size in known if -(-num_inputs // size) == num_groups}
    if len({min(size, num_inputs) for size in fits}) != 1:
        said = ", ".join(str(size) for size in sorted(known)) or "none"
        raise misfit(
            stored["scales"],
            stored[VALUES],
            f"{num_inputs} inputs have {num_groups} groups; the config's sizes of a group: {said}",
        )
    return min(fits)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def positive(scales: torch.Tensor) -> torch.Tensor:
    """The scales, with NaN in the place of those that are not positive, or infinite: some are divided by."""
    return torch.where((scales > 0) & (scales < float("inf")), scales, float("nan"))


def not_negative(scales: torch.Tensor) -> torch.Tensor:
    """The scales, with NaN in the place of those that are negative; a group of zeros may have one that is zero."""
    return torch.where(scales >= 0, scales, float("nan"))


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[..., count] int32 of [..., W] int32 words: the lowest bits first, unsigned."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
    return values.flatten(-2)[..., :count]


def of_groups(values: torch.Tensor, groups: torch.Tensor, missing: float) -> torch.Tensor:
    """[n, K] of [n, G]: each input's own of its group; `missing` where there is no such group."""
    padded = torch.cat((values, values.new_full((values.shape[0], 1), missing)), 1)
    last = values.shape[1]
    return padded.index_select(1, torch.where((groups >= 0) & (groups < last), groups, last))
