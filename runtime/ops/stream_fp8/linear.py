"""The fp8 linears that kernels for few tokens on Hopper compute, and the base of their divisions; free of torch.

Shape legend: N rows and K columns of the weight; of a gated one N counts gate and up rows.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from mllm_compile.runtime.ops.stream_linear.linear import Boxes, LinearKind, LinearTiling

GROUP = 128  # columns that share a scale, where a row has several


@dataclass(frozen=True)
class Fp8Kind(LinearKind):
    """The parameters that a kernel is compiled for.

    Attributes:
        group: GROUP, or 0: a row has one scale.
    """

    group: int = 0

    @property
    def name(self) -> str:
        return f"fp8{f'g{self.group}' if self.group else ''}_{super().name}"


@dataclass(frozen=True)
class Fp8Tiling(LinearTiling):
    """The way in which one kernel divides a linear."""

    headers: ClassVar[tuple[str, ...]] = ("ops/stream_fp8/e4m3.cuh",)

    kind: Fp8Kind

    @abstractmethod
    def boxes(self, num_tokens: int) -> Boxes: ...
