"""The linears of weights in few bits that kernels for few tokens on Hopper compute, and the base of their divisions;
free of torch.

Shape legend: N rows and K columns of the weight; of a gated one N counts gate and up rows.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mllm_compile.runtime.ops.stream_linear.linear import Boxes, LinearKind, LinearTiling

if TYPE_CHECKING:
    import torch

GROUP = 128  # columns that share a scale, where a row of fp8 or of integers has several
PANEL_BYTES = 128  # of a row of values: what is swizzled together
HEADERS = ("cuda/e4m3.cuh", "ops/stream_quantised/int4.cuh", "ops/stream_quantised/e2m1.cuh")

Values = Literal["fp8", "int4", "mxfp4", "nvfp4"]
Scales = Literal["float32", "bfloat16", "float16", "uint8", "float8_e4m3fn"]
_SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "float8_e4m3fn": 1}
_FLOATS = {"uint8": "mxfp4", "float8_e4m3fn": "nvfp4"}  # of four bits, by their scales


@dataclass(frozen=True)
class QuantisedKind(LinearKind):
    """The parameters that a kernel is compiled for.

    Attributes:
        values: what a value is, as WeightScheme.name has it; integers are in lanes.
        group: columns that share a scale; 0: a row has one scale.
        scales: the scales' dtype.
        zeros: there are zero points. (Of nvfp4 the third tensor is the rows' factors, which are always there.)
    """

    values: Values = "fp8"
    group: int = 0
    scales: Scales = "float32"
    zeros: bool = False

    @property
    def name(self) -> str:
        marks = [self.values, *([f"g{self.group}"] if self.group else []), *(["zeros"] if self.zeros else [])]
        marks += [self.scales] if self.values == "int4" else []
        return f"{''.join(marks)}_{super().name}"

    @property
    def values_a_byte(self) -> int:
        return 1 if self.values == "fp8" else 2

    @property
    def has_floats(self) -> bool:
        """True of floats of four bits, which are multiplied by their scales before the products are made."""
        return self.values in ("mxfp4", "nvfp4")

    @property
    def scale_bytes(self) -> int:
        return _SCALE_BYTES[self.scales]

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return PANEL_BYTES * self.values_a_byte

    def constants(self) -> dict[str, int]:
        plain = LinearKind(*(getattr(self, name) for name in LinearKind.__dataclass_fields__)).constants()
        return {
            **plain,
            "BITS": 8 // self.values_a_byte,
            "FLOATS": int(self.has_floats),
            "FACTORS": int(self.values == "nvfp4"),
            "GROUP": self.group,
            "ZEROS": int(self.zeros),
            "SCALE_BYTES": self.scale_bytes,
            "SCALES_ARE_HALF": int(self.scales == "float16"),
        }


BLOCK_BYTES = 227 << 10  # of shared memory, at most
# Shared memory of a multiprocessor; of that, a block's of the system.
_ROOM_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10
_MORE_BYTES = 1 << 10


def room_of_block(kind: QuantisedKind) -> int:
    """Bytes of shared memory for a block that leaves room for one of the next kernel.

    Linears with a residual have a little more than a half of a multiprocessor's, the others as much less. So no two
    blocks of the former are on one multiprocessor, nor two of the latter beside one of those. Of equal halves two of o
    would be where attention, on a part of the multiprocessors, is not, and then two of gate_up on the rest.
    """
    return _ROOM_BYTES // 2 - _RESERVED_BYTES + (_MORE_BYTES if kind.residual else -_MORE_BYTES)


def kind_of_weight(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> QuantisedKind:
    """The kind of a linear with nothing around it; none that a kernel takes (shapes.is_streamed) has a row of an odd
    number of columns."""
    name: Scales = str(scales.dtype).removeprefix("torch.")  # type: ignore[assignment]
    of_values: Any = "fp8" if values.dtype.is_floating_point else _FLOATS.get(name, "int4")
    rows, columns = int(values.shape[0]), int(values.shape[1]) * (1 if of_values == "fp8" else 2)
    num_groups = int(scales.shape[1])
    group = columns // num_groups if num_groups > 1 else 0
    has_zeros = zeros is not None and of_values == "int4"
    return QuantisedKind(rows, columns, values=of_values, group=group, scales=name, zeros=has_zeros)


@dataclass(frozen=True)
class QuantisedTiling(LinearTiling):
    """The way in which one kernel divides a linear."""

    kind: QuantisedKind

    @abstractmethod
    def boxes(self, num_tokens: int) -> Boxes: ...
