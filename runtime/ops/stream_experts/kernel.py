"""The layout of the kernels: rings of stages in shared memory, and what is behind them.

Shape legend: E experts, k experts a token, I outputs of gate_up and inputs of down, K inputs of gate_up, N outputs of
down.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel
from mllm_compile.runtime.ops.stream_experts.shapes import MAX_TOKENS, ROWS

_WARPS = 8  # that compute; one more asks for weights
_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of shared memory; of that, a block's of the system
_MOST_STAGES = 16
_FEWEST_WORKERS = 4


@dataclass(frozen=True)
class Routing:
    """The choice of experts that a kernel finds.

    Attributes:
        experts, chosen: E and k.
        score_bytes: of a router's score, 2 or 4; 0: the choice is given.
        softmax, renormalise: of choose_experts.
        wide: weights are float32; else bfloat16.
    """

    experts: int
    chosen: int
    score_bytes: int
    softmax: int
    renormalise: bool
    wide: bool

    @property
    def name(self) -> str:
        how = f"scores{self.score_bytes}_{self.softmax}{int(self.renormalise)}" if self.score_bytes else "given"
        return f"{self.experts}x{self.chosen}_{how}" + ("_wide" if self.wide else "")

    @cached_property
    def bytes(self) -> int:
        """At most of choice.cuh's Choice."""
        active = min(MAX_TOKENS * self.chosen, self.experts)
        numbers = MAX_TOKENS * self.chosen * (4 + 2) + active * (2 + MAX_TOKENS)
        return numbers + 4 * math.ceil(self.experts / 32) + 4 + 8


@dataclass(frozen=True)
class ExpertsKernel(CudaKernel):
    """
    Attributes:
        routing: the choice.
        rows, columns: of an expert's weight.
    """

    headers: ClassVar[tuple[str, ...]] = ("ops/stream_experts/choice.cuh",)
    switch: ClassVar[str] = "compile.disable_passes: [stream_experts]"

    routing: Routing
    rows: int
    columns: int

    @property
    def num_threads(self) -> int:
        return 32 * (_WARPS + 1)

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @property
    @abstractmethod
    def stage_bytes(self) -> int: ...

    @property
    @abstractmethod
    def other_bytes(self) -> int:
        """Bytes of shared memory beside the ring, without its barriers."""

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return 1

    @cached_property
    def stages(self) -> int:
        return self._most_stages

    @property
    def _most_stages(self) -> int:
        room = _MULTIPROCESSOR_BYTES // self.resident - _RESERVED_BYTES - self.other_bytes
        return min(_MOST_STAGES, room // (self.stage_bytes + 2 * 8))

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 2 * 8) + self.other_bytes

    @abstractmethod
    def constants(self) -> dict[str, int]:
        routing = self.routing
        return {
            "EXPERTS": routing.experts,
            "CHOSEN": routing.chosen,
            "SCORE_BYTES": routing.score_bytes,
            "SOFTMAX": routing.softmax,
            "RENORMALISE": int(routing.renormalise),
            "WIDE": int(routing.wide),
            "K": self.columns,
            "STAGES": self.stages,
            "SHARED_BYTES": self.shared_bytes,
        }


@dataclass(frozen=True)
class GateUpKernel(ExpertsKernel):
    """
    Attributes:
        norm_blocks: sums of squares a token that it reads; 0: x is taken as it is.
    """

    source: ClassVar[str] = "ops/stream_experts/gate_up.cu"
    function: ClassVar[str] = "expert_gate_up"

    norm_blocks: int

    @property
    def name(self) -> str:
        return f"expert_gate_up_{self.rows}x{self.columns}_norm{self.norm_blocks}_{self.routing.name}"

    @property
    def piece(self) -> int:
        """Columns of a row in a stage: long pieces are read the faster, and several must be on their way."""
        units = self.columns // _PIECE_UNIT
        return _PIECE_UNIT * max(count for count in range(1, _MOST_PIECE_UNITS + 1) if units % count == 0)

    @property
    def num_blocks(self) -> int:
        return MULTIPROCESSORS * self.resident

    @property
    def stage_bytes(self) -> int:
        return ROWS * self.piece * 2

    @property
    def other_bytes(self) -> int:
        sums = 2 * _WARPS * MAX_TOKENS * (ROWS + 4)
        return 4 * (sums + MAX_TOKENS) + self.routing.bytes

    def constants(self) -> dict[str, int]:
        return {
            **super().constants(),
            "OUTPUTS": self.rows // 2,
            "PIECE": self.piece,
            "RESIDENT": self.resident,
            "NORM_BLOCKS": self.norm_blocks,
        }


_PIECE_UNIT, _MOST_PIECE_UNITS = 256, 4  # a step of each warp


@dataclass(frozen=True)
class DownKernel(ExpertsKernel):
    """
    Attributes:
        next_blocks: sums of squares a token that it leaves for the next norm; 0: no norm.
        plus_one: that norm multiplies by 1 + its weight.
    """

    source: ClassVar[str] = "ops/stream_experts/down.cu"
    function: ClassVar[str] = "expert_down"

    next_blocks: int
    plus_one: bool = False

    @property
    def name(self) -> str:
        mark = "_plus_one" if self.plus_one else ""
        return f"expert_down_{self.rows}x{self.columns}_next{self.next_blocks}{mark}_{self.routing.name}"

    @cached_property
    def stages(self) -> int:
        """The most that divide among enough warps, where each reads its own."""
        return next(count for count in range(self._most_stages, 0, -1) if _workers_of(count) >= _FEWEST_WORKERS)

    @property
    def num_blocks(self) -> int:
        return min(MULTIPROCESSORS, self.rows // ROWS)

    @property
    def stage_bytes(self) -> int:
        return ROWS * self.columns * 2

    @property
    def other_bytes(self) -> int:
        return 4 * 2 * MAX_TOKENS * self.routing.chosen * ROWS + self.routing.bytes

    def constants(self) -> dict[str, int]:
        return {
            **super().constants(),
            "N": self.rows,
            "WORKERS": _workers_of(self.stages),
            "NEXT_BLOCKS": self.next_blocks,
            "PLUS_ONE": int(self.plus_one),
        }


def _workers_of(stages: int) -> int:
    """Warps that take the experts of down in turns."""
    return max(count for count in range(1, _WARPS + 1) if stages % count == 0)
