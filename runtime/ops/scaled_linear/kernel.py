"""The kernels of linears in fp8 for 8 to 256 tokens on Hopper: stream_linear/wide.cu of other operands; without torch.

Shape legend: N rows and K columns of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from mllm_compile.runtime.cuda.wgmma import multiply_add_all
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind, early_stages
from mllm_compile.runtime.ops.stream_linear.wide import WideTiling

BUCKETS = (64, 96, 128, 160, 192, 224, 256)  # a kernel each; a step takes the first that holds its tokens
MAX_TOKENS = BUCKETS[-1]
# Tokens that are divided among tiles are eight of each at least: of fewer a tile would begin ahead of the first token.
FEWEST_TOKENS = 8

# With so few tokens three groups of warps leave registers free for as many more threads. So the kernel that makes the
# next inputs has started when they end (docs/lab/quantised.md, Decode steps).
_MOST_TOKENS_BESIDE, _THREADS_BESIDE = 128, 128
_ROWS_UNIT, _PANEL = 64, 128  # what a weight's rows and columns are multiples of


@dataclass(frozen=True)
class ScaledKind(LinearKind):
    """A weight [N, K] of float8_e4m3fn with a scale a row, of inputs with a scale a token; nothing is around it."""

    @property
    def name(self) -> str:
        return f"scaled_{self.rows}x{self.columns}"

    @property
    def panel(self) -> int:
        return _PANEL

    def constants(self) -> dict[str, int]:
        return {**super().constants(), "SCALED": 1}


@dataclass(frozen=True)
class ScaledTiling(WideTiling):
    """The way in which one kernel divides such a linear."""

    switch: ClassVar[str] = "compile.disable_passes: [quantise_activations]"

    kind: ScaledKind

    @property
    def register_threads(self) -> int:
        return self.num_threads + (_THREADS_BESIDE if self.tile_tokens <= _MOST_TOKENS_BESIDE else 0)

    @property
    def early_weight_stages(self) -> int:
        # The kernel that makes x, between two linears, reads the previous one's output: it would wait behind a whole
        # ring.
        return min(super().early_weight_stages, early_stages(self.weight_stage_bytes, resident=1))

    def preamble(self) -> str:
        return multiply_add_all(self.tile_tokens // self.parts, in_fp8=True)


def is_taken(rows: int, columns: int) -> bool:
    """True if there are kernels for a weight: it divides into tiles, and 32 bits count its outputs."""
    return rows % _ROWS_UNIT == columns % _PANEL == 0 and rows * MAX_TOKENS < 2**31


@cache
def scaled_kernels(rows: int, columns: int) -> tuple[ScaledTiling, ...]:
    """The kernels of a weight that is taken, one for each bucket."""
    return tuple(choose(rows, columns, tokens) for tokens in BUCKETS)


def choose(rows: int, columns: int, tokens: int) -> ScaledTiling:
    """The tiling for a bucket of tokens."""
    return min(ScaledTiling.all_of(ScaledKind(rows, columns), tokens), key=lambda tiling: tiling.cost)


def bucket_of(num_tokens: int) -> int:
    """The bucket of up to MAX_TOKENS tokens."""
    return next(tokens for tokens in BUCKETS if num_tokens <= tokens)


def tiling_from_json(data: Mapping[str, Any]) -> ScaledTiling:
    """Reads what `to_json` wrote. Raises KeyError or ValueError for anything else."""
    return from_json(ScaledTiling, {name: value for name, value in data.items() if name != "source"})
