"""Refuses weights that hold no numbers, or are not those that were packed, once they are in their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mllm_compile.runtime.errors import CheckpointError, DamagedWeightsError
from mllm_compile.runtime.quantised.numbers import E8M0_NAN
from mllm_compile.runtime.quantised.scheme import SCALES
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec, place_of
from mllm_compile.runtime.weights.sums import weight_sums

_CHECKED_ROWS = 4096  # of a weight that is looked at value by value: bounds what that takes beside it


class Fault(NamedTuple):
    """A tensor with NaN or inf, the words for it, and whether another type of the model may hold its values."""

    part: WeightPart
    what: str
    depends_on_dtype: bool = False


def check_finite(specs: Sequence[WeightSpec], weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse weights with NaN or inf, as faults_of finds them."""
    for part, what, depends_on_dtype in faults_of(specs, weights):
        more = "; if it is whole, set model.dtype to one that holds its values, such as bfloat16 or float32"
        raise CheckpointError(
            f"{folder / part.file}: tensor {part.tensor!r} {what}. Fetch the checkpoint again"
            f"{more if depends_on_dtype else ''}."
        )


def faults_of(specs: Sequence[WeightSpec], weights: Mapping[str, torch.Tensor]) -> Iterator[Fault]:
    """Finds NaN and inf: one reduction a weight, and one look at all of them together.

    A sum shows every such value and reads at the memory's speed (16 GB in some 5 ms on an H100). One of finite values
    may overflow as well, so the weight is looked at again before it is refused. Of values in eight bits, which have no
    inf, two are NaN; of scales that are powers of two one is. Other scales in eight bits are not negative either.
    """
    floats = [spec for spec in specs if spec.dtype == torch.float8_e4m3fn]
    yield from _eight_bits(floats, weights, 0x7F, "holds NaN among its values in eight bits")
    powers = [spec for spec in specs if any(_has_scales_of(part, torch.uint8) for part in spec.parts)]
    yield from _eight_bits(powers, weights, E8M0_NAN, "holds NaN among its scales in eight bits")
    scales = [spec for spec in floats if any(_has_scales_of(part, torch.float8_e4m3fn) for part in spec.parts)]
    yield from _eight_bits(scales, weights, 0x80, "holds a negative scale")
    summed = [spec for spec in specs if spec.dtype.is_floating_point and spec.dtype.itemsize > 1]
    if not summed:
        return
    are_finite = torch.stack([weights[spec.name].sum().float() for spec in summed]).isfinite()
    for spec, is_finite in zip(summed, are_finite.tolist(), strict=True):
        for part in () if is_finite else spec.parts:
            yield from _part_faults(part, place_of(weights[spec.name], part))


def _has_scales_of(part: WeightPart, dtype: torch.dtype) -> bool:
    return part.kept is not None and part.kept.role == SCALES and part.kept.scheme.scale_dtype == dtype


def _eight_bits(
    specs: Sequence[WeightSpec], weights: Mapping[str, torch.Tensor], bits: int, what: str
) -> Iterator[Fault]:
    """Finds parts with a byte that has all of `bits` set."""
    if not specs:
        return
    are_wrong = _have_bits([weights[spec.name] for spec in specs], bits)
    for spec, is_wrong in zip(specs, are_wrong, strict=True):
        for part in spec.parts if is_wrong else ():
            if _have_bits([place_of(weights[spec.name], part)], bits)[0]:
                yield Fault(part, what)


def _have_bits(tensors: Sequence[torch.Tensor], bits: int) -> list[bool]:
    """True for each that has a byte with all of these bits: all eight, the last seven, or the first.

    Such a byte is the largest, with a sign or without one: two reductions read memory once each, and write none.
    """
    largest = [one.view(dtype).amax().view(torch.uint8) for one in tensors for dtype in (torch.uint8, torch.int8)]
    found: list[bool] = ((torch.stack(largest) & bits) == bits).view(-1, 2).any(1).tolist()
    return found


def _part_faults(part: WeightPart, place: torch.Tensor) -> Iterator[Fault]:
    slices = place.split(_CHECKED_ROWS) if place.dim() else (place,)
    num_bad = sum(int((~values.isfinite()).sum()) for values in slices)
    if num_bad:
        why = "" if part.quantised is None else ": a scale is no number that it may be, or a group is not there"
        dtype = str(place.dtype).removeprefix("torch.")
        yield Fault(part, f"holds NaN or inf in {num_bad} of its {place.numel()} values as {dtype}{why}", True)


def check_sums(specs: Iterable[WeightSpec], weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Compare packed weights in their place with the sums that their specs remember."""
    known = {spec.name: spec for spec in specs if spec.byte_sum is not None}
    for name, byte_sum in weight_sums({name: weights[name] for name in known}).items():
        if byte_sum != known[name].byte_sum:
            raise DamagedWeightsError(
                f"{folder / known[name].parts[0].file}: {name!r} is not what was packed (its sum differs); "
                "compile the model again with --pack-weights, or put the file back"
            )
