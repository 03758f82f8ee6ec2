"""Divides a linear of 129 to 256 tokens, or in fp8 of 8 to 256, among the multiprocessors, for wide.cu.

Shape legend: as linear.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, Self

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.cuda.wgmma import multiply_add_all
from mllm_compile.runtime.ops.stream_linear.linear import Boxes, LinearKind, LinearTiling

# A tiling is stored without the values that follow from these, and its binary was compiled for them: raise
# FORMAT_VERSION with a change of one.
_ROW_BYTES = 128  # of a swizzled row of shared memory
_GROUP_ROWS = 64  # of the weight, that four warps multiply
_EIGHT = 8  # tokens; a tile has a multiple
_MOST_TOKENS = 256  # of a tile: columns of a wgmma
_WARP_BYTES = 512  # a warp turns its sums in it: 16 tokens of 16 outputs, of a gated one 32 of 8
# Three groups leave a launch 128 registers a thread, among which an instruction's sums must be, and what else it needs.
_MOST_PART = 200
_GROUPS, _TOKEN_TILES, _SPLITS = (1, 2, 3), (1, 2, 3, 4), (1, 2)
_BLOCK_BYTES = 227 << 10
_LEAST_STAGES, _MOST_STAGES = 2, 16

# A tiling's costs, in µs. They are: beginning and ending; a cycle, by the largest of products (of a panel's columns 32
# rows times tokens a cycle: 2048 products in bfloat16, 4096 in fp8), traffic of shared memory (128 bytes a cycle), and
# waits for a stage that was loaded when another was free; a KB that blocks read or send each other; and, as a part of
# all that, the division of tokens among tiles. In 37 linears of Qwen3-0.6B and 8B, of 144 to 256 tokens, with one to
# fifteen tilings each on an H200, the cheapest took 1 % longer than the fastest on average, 9 % at most.
_BEGIN, _CYCLE, _READ_KB, _SENT_KB, _TOKEN_TILE = 2.9, 0.0005, 3e-5, 0.08, 0.1
_PAIRS_A_CYCLE, _BYTES_A_CYCLE = 32, 128
_STAGE_CYCLES, _STAGE_BYTES_A_CYCLE = 300, 32  # from asking for a stage until it is there


@dataclass(frozen=True)
class WideTiling(LinearTiling):
    """
    Attributes:
        groups: groups of four warps; each multiplies 64 rows of the weight.
        token_tiles: how many tiles the tokens are divided among.
        split: blocks of a cluster, which divide the columns.
    """

    source: ClassVar[str] = "ops/stream_linear/wide.cu"
    headers: ClassVar[tuple[str, ...]] = ("ops/stream_linear/boxes.cuh",)
    function: ClassVar[str] = "wide_linear"

    groups: int
    token_tiles: int
    split: int

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return self.groups * _GROUP_ROWS

    @cached_property
    def tile_tokens(self) -> int:
        """Tokens that a tile has room for."""
        return self.box_tokens(self.tokens)

    def boxes(self, num_tokens: int) -> Boxes:
        return Boxes(self.rows, 1, self.box_tokens(num_tokens))

    def box_tokens(self, num_tokens: int) -> int:
        """Tokens in a tile, and in one TMA copy of x, for a step of `num_tokens`: eight or more if they are divided.
        Mirrors Division in wide.cu."""
        if self.token_tiles == 1:
            return num_tokens
        return _EIGHT * math.ceil(num_tokens / self.token_tiles / _EIGHT)

    @cached_property
    def parts(self) -> int:
        """Parts of a tile's tokens, each multiplied by an instruction of its own."""
        return 2 if self.groups == max(_GROUPS) and self.tile_tokens > _MOST_PART else 1

    @cached_property
    def num_tiles(self) -> int:
        return math.ceil(self.kind.rows / self.rows) * self.token_tiles

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks; undivided tiles are taken in turns, by as many blocks as there are multiprocessors."""
        return self.num_tiles * self.split if self.split > 1 else min(self.num_tiles, MULTIPROCESSORS)

    @property
    def num_threads(self) -> int:
        """Threads of the warp groups that multiply, and of the one that loads."""
        return 128 * (self.groups + 1)

    @property
    def register_threads(self) -> int:
        """Threads that could have as many registers: more than there are leave some to the next kernel's blocks."""
        return self.num_threads

    @cached_property
    def x_stages(self) -> int:
        """Stages of x's ring: as many as the weight's can have too."""
        return min((_BLOCK_BYTES - self._other_bytes) // self._stage_bytes, self._steps, _MOST_STAGES)

    @cached_property
    def weight_stages(self) -> int:
        """Stages of the weight's ring: what fits beside x's."""
        room = _BLOCK_BYTES - self._other_bytes - self.x_stages * self.tile_tokens * _ROW_BYTES
        return min(room // self.weight_stage_bytes, self._steps, _MOST_STAGES)

    @property
    def weight_stage_bytes(self) -> int:
        return self.rows * _ROW_BYTES

    @property
    def early_weight_stages(self) -> int:
        """Stages that are asked for before x is there."""
        return self.weight_stages

    @property
    def shared_bytes(self) -> int:
        stages = self.weight_stages * self.rows + self.x_stages * self.tile_tokens
        return stages * _ROW_BYTES + self._other_bytes

    @property
    def _steps(self) -> int:
        """Stages of a block's tile."""
        return self.kind.columns // self.kind.panel // self.split

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.tile_tokens) * _ROW_BYTES

    @property
    def _sent_bytes(self) -> int:
        """Bytes of sums that a block is sent, at most."""
        if self.split == 1:
            return 0
        unit = 32 if self.kind.gated else 16
        own = math.ceil(math.ceil(self.tile_tokens / unit) / self.split)
        return own * unit * self.rows * 4

    @property
    def _other_bytes(self) -> int:
        """Bytes of the ring's alignment, others' sums, what warps turn, factors and barriers."""
        turned = 4 * self.groups * _WARP_BYTES
        return 1024 + self._sent_bytes + turned + _MOST_TOKENS * 4 + (2 * _MOST_STAGES + 2) * 8

    @property
    def is_possible(self) -> bool:
        """True if it fits into a multiprocessor, its registers too, and its clusters into one wave."""
        fits = self.tile_tokens <= _MOST_TOKENS and self.kind.columns // self.kind.panel % self.split == 0
        has_registers = self.parts == 1 or not self.kind.residual  # residuals are in registers, as sums are
        at_once = self.split == 1 or self.num_blocks <= MULTIPROCESSORS
        return fits and has_registers and at_once and self.x_stages >= min(_LEAST_STAGES, self._steps)

    @property
    def cost(self) -> float:
        """Estimated cost: of two tilings the cheaper is the faster, as a rule."""
        rows, tokens = self.rows, self.tile_tokens
        products = rows * tokens / _PAIRS_A_CYCLE
        read = self.groups * (_GROUP_ROWS * self.parts + tokens) + rows + tokens  # rows of shared memory, and written
        turns = math.ceil(self.num_tiles * self.split / MULTIPROCESSORS)
        wait = (_STAGE_CYCLES + self._stage_bytes / _STAGE_BYTES_A_CYCLE) / max(1, self.x_stages - 1)
        cycles = turns * self._steps * max(products, read * _ROW_BYTES / _BYTES_A_CYCLE, wait)
        read_kb = self.num_tiles * self.split * self._steps * self._stage_bytes / 1000
        time = _BEGIN + cycles * _CYCLE + read_kb * _READ_KB
        if self.split > 1:
            time += rows * tokens * 2 / 1024 * _SENT_KB
        return time * (1 + _TOKEN_TILE * (self.token_tiles - 1))

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "GROUPS": self.groups,
            "TOKEN_TILES": self.token_tiles,
            "TOKENS": self.tile_tokens,
            "PARTS": self.parts,
            "SPLIT": self.split,
            "BLOCKS": self.num_blocks,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
            "REGISTER_THREADS": self.register_threads,
            "W_STAGES": self.weight_stages,
            "EARLY_STAGES": self.early_weight_stages,
            "X_STAGES": self.x_stages,
        }

    def preamble(self) -> str:
        return multiply_add_all(self.tile_tokens // self.parts)

    @classmethod
    def all_of(cls, kind: LinearKind, tokens: int) -> Iterator[Self]:
        """The possible tilings for a bucket of tokens."""
        for groups, token_tiles, split in itertools.product(_GROUPS, _TOKEN_TILES, _SPLITS):
            tiling = cls(kind, tokens, groups, token_tiles, split)
            if tiling.is_possible:
                yield tiling


@cache
def choose(kind: LinearKind, tokens: int) -> WideTiling:
    """The tiling for a bucket of tokens."""
    return min(WideTiling.all_of(kind, tokens), key=lambda tiling: tiling.cost)
