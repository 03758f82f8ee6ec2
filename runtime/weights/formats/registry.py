"""The formats of quantised weights that are read, and how one weight's tensors become the weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from mllm_compile.runtime.quantised.numbers import in_lanes
from mllm_compile.runtime.quantised.numbers import quantised as quantised_tensors
from mllm_compile.runtime.quantised.scheme import VALUES, WeightScheme
from mllm_compile.runtime.weights.formats.base import Format, Quantised, Tensors
from mllm_compile.runtime.weights.formats.float8 import (
    BlockFloat8,
    CompressedFloat8,
    ModelOptFloat8,
    ScaledFloat8,
)
from mllm_compile.runtime.weights.formats.gguf import GGUF_FORMATS
from mllm_compile.runtime.weights.formats.gguf_changes import GGUF_CHANGES
from mllm_compile.runtime.weights.formats.gptq import Awq, Gptq
from mllm_compile.runtime.weights.formats.mxfp4 import CompressedMxfp4, Mxfp4
from mllm_compile.runtime.weights.formats.nf4 import Nf4
from mllm_compile.runtime.weights.formats.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from mllm_compile.runtime.weights.formats.packed_int import PackedInt

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Mxfp4(),
        BlockFloat8(),
        ScaledFloat8(),
        CompressedFloat8(),
        PackedInt(),
        CompressedMxfp4(),
        CompressedNvfp4(),
        Gptq(),
        Awq(),
        ModelOptFloat8(),
        ModelOptNvfp4(),
        Nf4(),
        *GGUF_FORMATS,
        *GGUF_CHANGES,
    )
}
# Computed at once: bounds what that takes beside the weight. A CPU's caches hold the first. On a GPU a launch takes
# longer than so few are computed: an update of 8B into fp8 was 293,000 launches in 2.5 s, and is 5,000.
_MOST_VALUES, _MOST_VALUES_OF_GPU = 1 << 18, 1 << 24
_ROWS_ALIGNED = 128

View = Callable[[torch.Tensor], torch.Tensor]


def fill_dequantised(
    place: torch.Tensor, quantised: Quantised, shape: Sequence[int], view: View | None, tensors: Sequence[torch.Tensor]
) -> None:
    """Fills `place` with the weight that `tensors` hold, a few rows at a time.

    Args:
        place: any strides, any dtype.
        quantised: how they hold it.
        shape: the weight's own.
        view: what of the weight goes into the place; None: all of it.
        tensors: in the order of `quantised.tensors`.
    """
    by_role = dict(zip(quantised.tensors, tensors, strict=True))
    if view is None:
        _fill(place, quantised, shape, by_role)
        return
    weight = torch.empty(shape, dtype=place.dtype, device=place.device)
    _fill(weight, quantised, shape, by_role)
    place.copy_(view(weight))


def _fill(weight: torch.Tensor, quantised: Quantised, shape: Sequence[int], tensors: Tensors) -> None:
    fmt = FORMATS[quantised.format]
    aligned = _ROWS_ALIGNED if len(shape) == 2 else 1
    step = max(_most_values(weight) // max(math.prod(shape[1:]), 1) // aligned, 1) * aligned
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        weight[start:stop].copy_(fmt.rows(tensors, quantised.numbers, start, stop))


def fill_kept(
    place: torch.Tensor,
    quantised: Quantised,
    role: str,
    scheme: WeightScheme,
    view: View | None,
    tensors: Sequence[torch.Tensor],
) -> None:
    """Fills `place` with the tensor of this role of the scheme that the weight's format has.

    Args:
        scheme: of the weight in memory: its format's, except for the order of values.
        view: what of it goes into the place; None: all of it.
        tensors: the format's `sources` that the weight has, in their order.
    """
    fmt = FORMATS[quantised.format]
    by_role = dict(zip(kept_sources(quantised, role), tensors, strict=True))
    kept = fmt.kept_tensor(role, by_role, quantised.numbers)
    if role == VALUES and scheme.kind == "int4_lanes":
        kept = in_lanes(kept)
    place.copy_(kept if view is None else view(kept))


def is_stored(quantised: Quantised, role: str) -> bool:
    """True if the checkpoint has the scheme's tensor of this role to the byte."""
    return role in FORMATS[quantised.format].as_stored


def kept_sources(quantised: Quantised, role: str) -> list[str]:
    """Roles of the tensors that fill_kept takes."""
    return [one for one in FORMATS[quantised.format].sources(role) if one in quantised.tensors]


def fill_quantised(
    places: Mapping[str, torch.Tensor], weight: torch.Tensor, scheme: WeightScheme, parts: Mapping[str, View]
) -> None:
    """Quantises a weight [N, K], or [E, N, K], into its tensors, a few rows at a time.

    Args:
        places: by role; those that are to be filled.
        parts: what of the rows of each tensor goes into its place.
    """
    step = _most_values(weight) // max(math.prod(weight.shape[1:]), 1)
    if weight.dim() > 2 and not step:
        for expert, one in enumerate(weight):
            fill_quantised({role: place[expert] for role, place in places.items()}, one, scheme, parts)
        return
    for start in range(0, weight.shape[0], max(step, 1)):
        rows = slice(start, start + max(step, 1))
        found = quantised_tensors(weight[rows], scheme)
        for role, place in places.items():
            place[rows].copy_(parts[role](found[role]))


def _most_values(weight: torch.Tensor) -> int:
    return _MOST_VALUES if weight.device.type == "cpu" else _MOST_VALUES_OF_GPU
