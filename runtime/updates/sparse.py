"""Some values of a tensor, by their places in it when it is flat, as places in the weight that it is part of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mllm_compile.runtime.errors import WeightUpdateError
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.places import Use
from mllm_compile.runtime.weights.formats.base import FLOATS
from mllm_compile.runtime.weights.spec import WeightPart, place_of
from mllm_compile.runtime.weights.views import view_shape

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Scatter:
    """Values that replace others of one weight.

    Attributes:
        weight: its name.
        places: [n] int64, in the flat weight, in rows.
        values: [n], of its dtype.
    """

    weight: str
    places: torch.Tensor
    values: torch.Tensor

    def write(self, live: LiveWeights) -> None:
        """Writes them into the weight that serves."""
        served = live.tensors[self.weight]
        if self.weight not in live.panels:
            served.view(-1).index_copy_(0, self.places, self.values)
            return
        rows = live.in_rows(self.weight)
        rows.view(-1).index_copy_(0, self.places, self.values)
        live.as_served(self.weight, rows)
        served.copy_(rows)


def scatters_of(
    name: str, uses: Sequence[Use], indices: torch.Tensor, values: torch.Tensor, live: LiveWeights
) -> list[Scatter]:
    """The values where they go in each weight.

    Beside steps that run, each wait of the host for the device lasts as long as one. So there is a single one, and two
    more for a part that leaves some of the tensor out.

    Args:
        indices: [n] int32 or int64.
        values: [n], of a floating type.

    Raises:
        WeightUpdateError: an index is beyond the tensor or there twice, a value is NaN or inf, or it is quantised.
    """
    _check_kinds(name, uses, indices, values)
    found, faults = list[Scatter](), _faults_of(name, uses, indices)
    for use in uses:
        served = live.tensors[use.spec.name]
        flat, new = indices.to(served.device, torch.int64), values.to(served.device)
        at, is_there = _through(use.part, _unravelled(flat, use.part.shape))
        place = place_of(torch.empty_like(served, device="meta"), use.part)
        places = torch.full_like(flat, int(place.storage_offset()))
        for one, stride in zip(at, place.stride(), strict=True):
            places += one * stride
        new = new.to(served.dtype)
        if use.part.factor is not None:
            new = new * live.factors[use.part.factor]
        none = f"values of {name!r} hold NaN or inf as {served.dtype}. The update is refused."
        faults.append((~new.isfinite().all(), none))
        if is_there is not None:
            places, new = places[is_there], new[is_there]
        found.append(Scatter(use.spec.name, places, new))
    _refuse(faults)
    return found


def check_values(name: str, uses: Sequence[Use], indices: torch.Tensor, values: torch.Tensor) -> None:
    """
    Args:
        uses: of one rank; empty: it has no part of the tensor.

    Raises:
        WeightUpdateError: as scatters_of, but for numbers that are none.
    """
    _check_kinds(name, uses, indices, values)
    _refuse(_faults_of(name, uses, indices))


_Fault = tuple[torch.Tensor, str]  # [] bool: it is there; how it is told


def _check_kinds(name: str, uses: Sequence[Use], indices: torch.Tensor, values: torch.Tensor) -> None:
    """Checks what the host knows; raises as check_values."""
    if indices.dim() != 1 or indices.shape != values.shape or indices.dtype not in _INDEX_DTYPES:
        raise WeightUpdateError(
            f"values of {name!r}: expected indices [n] of int32 or int64 and values [n], got {list(indices.shape)} of "
            f"{indices.dtype} and {list(values.shape)}."
        )
    if values.dtype not in FLOATS:
        raise WeightUpdateError(f"values of {name!r} are {values.dtype}; expected float32, float16 or bfloat16.")
    if any(use.part.kept is not None or not use.spec.dtype.is_floating_point for use in uses):
        raise WeightUpdateError(f"{name!r} is quantised in memory, where no single value changes. Send it whole.")
    if any(step[0] != "narrow" and step[0] not in _MOVES for use in uses for step in use.part.steps):
        raise WeightUpdateError(f"{name!r} is in memory in another order of rows. Send it whole.")


def _faults_of(name: str, uses: Sequence[Use], indices: torch.Tensor) -> list[_Fault]:
    """Faults that indices may have."""
    if not indices.numel():
        return []
    in_order, faults = indices.sort().values, list[_Fault]()
    if uses:
        count = math.prod(uses[0].part.shape)
        is_beyond = (in_order[0] < 0) | (in_order[-1] >= count)
        faults.append((is_beyond, f"an index of {name!r} is beyond its {count} values."))
    is_twice = (in_order[1:] == in_order[:-1]).any()
    return [*faults, (is_twice, f"an index of {name!r} is there twice. Send each value once.")]


def _refuse(faults: Sequence[_Fault]) -> None:
    """
    Raises:
        WeightUpdateError: one is there.
    """
    device = faults[-1][0].device if faults else None
    are_there = torch.stack([one.to(device) for one, _ in faults]).tolist() if faults else []
    for (_, message), is_there in zip(faults, are_there, strict=True):
        if is_there:
            raise WeightUpdateError(message)


def _unravelled(flat: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    found = []
    for size in reversed(shape):
        found.append(flat % size)
        flat = flat // size
    return found[::-1]


def _raveled(at: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    flat = torch.zeros_like(at[0])
    for one, size in zip(at, shape, strict=True):
        flat = flat * size + one
    return flat


def _through(part: WeightPart, at: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Where the part's views put the places, and which of them they leave; None: all."""
    is_there, shape = None, part.shape
    for step in part.steps:
        name, *args = step
        if name == "narrow":
            dim, start, length = (int(one) for one in args)
            at[dim] = at[dim] - start
            is_within = (at[dim] >= 0) & (at[dim] < length)
            is_there = is_within if is_there is None else is_there & is_within
        else:
            at = _MOVES[str(name)](at, shape, [int(one) for one in args])
        shape = view_shape(shape, (step,))
    return at, is_there


Places = list[torch.Tensor]


def _transposed(at: Places, shape: Sequence[int], dims: Sequence[int]) -> Places:
    at = list(at)
    at[dims[0]], at[dims[1]] = at[dims[1]], at[dims[0]]
    return at


def _reshaped(at: Places, shape: Sequence[int], sizes: Sequence[int]) -> Places:
    return _unravelled(_raveled(at, shape), view_shape(tuple(shape), (("reshape", *sizes),)))


def _squeezed(at: Places, shape: Sequence[int], dims: Sequence[int]) -> Places:
    dim = dims[0] % len(shape)
    return [*at[:dim], *at[dim + 1 :]]


def _unsqueezed(at: Places, shape: Sequence[int], dims: Sequence[int]) -> Places:
    dim = dims[0] % (len(shape) + 1)
    return [*at[:dim], torch.zeros_like(at[0]), *at[dim:]]


def _in_halves(at: Places, shape: Sequence[int], heads: Sequence[int]) -> Places:
    rows = shape[0] // heads[0]
    head, row = at[0] // rows, at[0] % rows
    return [head * rows + (row % 2) * (rows // 2) + row // 2, *at[1:]]


_MOVES: dict[str, Callable[[Places, Sequence[int], Sequence[int]], Places]] = {
    "transpose": _transposed,
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "unsqueeze": _unsqueezed,
    "halves": _in_halves,
}
