"""The ops of linears with adapters: `stream_linear_lora`, `stream_linear_lora_residual` and
`stream_linear_lora_residual_norm`, as streamed_ops.py has them, for up to 64 tokens.

A weight is [N, K] with A [L, P * r, K] and B [L, rows of all parts, r] of L adapters, bfloat16, the slot of each token
[T] int32 (-1: no adapter), and each part's first output and number of outputs, as `mllm.add_lora` has them.
early_slots is as lora_shrink has it. What adapters add is float32 until the sum is rounded.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mllm_compile.runtime.cuda.driver import Argument, address_of
from mllm_compile.runtime.ops.stream_linear.adapted import (
    MAX_TOKENS,
    AdaptedKind,
    AdaptedTileTiling,
    AdaptedTiling,
    num_sums,
    parts_of,
)
from mllm_compile.runtime.ops.stream_linear.linear import LinearTiling
from mllm_compile.runtime.ops.stream_linear.shapes import num_streamed_norm_blocks
from mllm_compile.runtime.ops.stream_linear.streamed_ops import LoadedLinear, StreamedOps, Weight

_MOST_COUNTS = 1 << 14  # of linears at the same time, of a device


class _Adapters(ctypes.Structure):
    """Mirrors Adapters in adapters.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "slots", "shrunk", "counts")),
        ("early_slots", ctypes.c_int),
    )


class AdaptedLinear(LoadedLinear):
    """One kernel of a linear with adapters."""

    _counts: dict[int, torch.Tensor] = {}  # noqa: RUF012  (by device: Counts in adapters.cuh)
    _places: dict[tuple[int, int], int] = {}  # noqa: RUF012  (by device and the address of A)
    _numbers = itertools.count()  # of places; threads of two engines never get the same one

    def __init__(self, kernel: LinearTiling, binaries: Mapping[str, bytes]) -> None:
        super().__init__(kernel, binaries)
        device = torch.cuda.current_device()
        if device not in self._counts:  # not in a capture, whose replays would make them anew
            zeros = torch.zeros(_MOST_COUNTS, 4, dtype=torch.int32, device=f"cuda:{device}")
            self._counts.setdefault(device, zeros)

    def _tell_beside(self, x: torch.Tensor, beside: Iterable[Any]) -> Iterable[Argument]:
        a, b, slots, *_, early_slots = beside
        assert isinstance(self.kernel, AdaptedTiling), "as Family chooses"
        shrunk = x.new_empty(num_sums(self.kernel), dtype=torch.float32)
        device = x.get_device()
        # Two engines may run the same kernel at the same time, but each has its own A.
        key = device, a.data_ptr()
        place = self._places[key] if key in self._places else self._places.setdefault(key, next(self._numbers))
        counts = self._counts[device]
        its_counts = counts.data_ptr() + place % _MOST_COUNTS * counts.stride(0) * counts.element_size()
        by_tma = isinstance(self.kernel, AdaptedTileTiling)  # which A's products do not read x by
        rows_of_x = (address_of(x),) if by_tma else ()
        addresses = (tensor.data_ptr() for tensor in (a, b, slots, shrunk))
        return (*rows_of_x, _Adapters(*addresses, its_counts, early_slots))


def _kind_of(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Iterable[int],
    counts: Iterable[int],
    early_slots: bool,
) -> AdaptedKind:
    rows, columns = weight.shape
    return AdaptedKind(int(rows), int(columns), rank=int(b.shape[2]), parts=parts_of(list(starts), list(counts)))


def _weight_of(weight: Weight, tokens: slice) -> Weight:
    """The weight of one of several launches. None takes tasks early: they have the same counts, one after another."""
    values, a, b, slots, *parts, _ = weight
    return values, a, b, slots[tokens], *parts, False


STREAMED = StreamedOps(
    "stream_linear_lora",
    "Tensor weight, Tensor a, Tensor b, Tensor slots, int[] starts, int[] rows, bool early_slots",
    _kind_of,
    num_streamed_norm_blocks,
    launch_tokens=MAX_TOKENS,
    loaded_as=AdaptedLinear,
    weight_of=_weight_of,
)
