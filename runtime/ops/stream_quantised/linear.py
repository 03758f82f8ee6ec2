"""The linears of weights in few bits that kernels for few tokens on Hopper compute, and the base of their divisions;
free of torch.

Shape legend: N rows and K columns of the weight; of a gated one N counts gate and up rows.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mllm_compile.runtime.ops.stream_linear.linear import Boxes, LinearKind, LinearTiling

if TYPE_CHECKING:
    import torch

GROUP = 128  # columns that share a scale, where a row has several
PANEL_BYTES = 128  # of a row of values: what is swizzled together
HEADERS = ("cuda/e4m3.cuh", "ops/stream_quantised/int4.cuh")

Values = Literal["fp8", "int4"]
Scales = Literal["float32", "bfloat16", "float16"]
_SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VALUES_A_BYTE = {"fp8": 1, "int4": 2}


@dataclass(frozen=True)
class QuantisedKind(LinearKind):
    """The parameters that a kernel is compiled for.

    Attributes:
        values: what a value is, as WeightScheme has it.
        group: columns that share a scale; 0: a row has one scale.
        scales: the scales' dtype.
        zeros: there are zero points.
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
        return _VALUES_A_BYTE[self.values]

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
            "GROUP": self.group,
            "ZEROS": int(self.zeros),
            "SCALE_BYTES": self.scale_bytes,
            "SCALES_ARE_HALF": int(self.scales == "float16"),
        }


def kind_of_weight(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> QuantisedKind:
    """The kind of a linear with nothing around it; none that a kernel takes (shapes.is_streamed) has a row of an odd
    number of columns."""
    of_values: Values = "fp8" if values.dtype.itemsize == 1 and values.dtype.is_floating_point else "int4"
    rows, columns = int(values.shape[0]), int(values.shape[1]) * _VALUES_A_BYTE[of_values]
    num_groups = int(scales.shape[1])
    group = columns // num_groups if num_groups > 1 else 0
    name: Scales = str(scales.dtype).removeprefix("torch.")  # type: ignore[assignment]
    return QuantisedKind(rows, columns, values=of_values, group=group, scales=name, zeros=zeros is not None)


@dataclass(frozen=True)
class QuantisedTiling(LinearTiling):
    """The way in which one kernel divides a linear."""

    kind: QuantisedKind

    @abstractmethod
    def boxes(self, num_tokens: int) -> Boxes: ...
