"""Blocks of the kernels for few tokens: whatever is taken divides into them, and fits a multiprocessor."""

from __future__ import annotations

import pytest

from mllm_compile.runtime.ops.few_tokens_shapes import (
    MAX_FEW_TOKENS,
    choose_few_token_blocks,
    is_taken,
    num_norm_blocks,
)

_SHARED_MEMORY = 227 << 10  # of a block on an H200, bytes


_COLUMNS = (256, 768, 1024, 2560, 3072, 4096, 5120, 11008, 12288, 14336, 28672)
_SHAPES = [
    *((rows, columns) for rows in (64, 1024, 2560, 3072, 4096, 6144, 8192, 12288) for columns in _COLUMNS),
    *((rows, columns) for rows in (128256, 151936) for columns in (1024, 5120, 8192)),
]


@pytest.mark.parametrize(("rows", "columns"), _SHAPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_weight_that_is_taken_divides_into_blocks_that_fit(rows, columns, is_gated):
    assert is_taken(rows, columns)
    blocks = choose_few_token_blocks(rows, columns, is_gated=is_gated)
    assert rows % blocks.rows == 0
    assert columns % (blocks.columns * blocks.groups) == 0
    assert blocks.columns >= 16, "of one product"
    assert blocks.groups <= blocks.num_warps
    width = blocks.rows * (2 if is_gated else 1) + MAX_FEW_TOKENS
    assert blocks.groups * width * blocks.columns * 2 * blocks.stages <= _SHARED_MEMORY


@pytest.mark.parametrize("shared_kb", [99, 163, 227])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("rows", "columns"), _SHAPES)
def test_blocks_fit_the_shared_memory_of_the_gpu_at_hand(rows, columns, is_gated, shared_kb):
    widest = choose_few_token_blocks(rows, columns, is_gated=is_gated)
    blocks = widest.within(shared_kb << 10, is_gated=is_gated)
    stage = (blocks.rows * (2 if is_gated else 1) + MAX_FEW_TOKENS) * blocks.columns * blocks.groups * 2
    assert 2 <= blocks.stages <= widest.stages
    assert stage * blocks.stages <= shared_kb << 10
    assert blocks.stages == widest.stages or stage * (blocks.stages + 1) > shared_kb << 10, "as many as fit"


@pytest.mark.parametrize(("rows", "columns"), [(4100, 1024), (1024, 128), (1024, 1000), (2**18, 2**13)])
def test_what_does_not_divide_is_left_to_the_library(rows, columns):
    assert not is_taken(rows, columns)


def test_a_norm_of_very_many_columns_stays():
    assert num_norm_blocks(1024, 3072) == 128
    assert num_norm_blocks(4096, 12288) == 256
    assert num_norm_blocks(8192, 28672) == 128
    assert num_norm_blocks(65536, 1024) is None
