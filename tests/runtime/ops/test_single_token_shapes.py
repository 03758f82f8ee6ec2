"""Blocks of the single-token kernels: whatever is taken divides into them."""

from __future__ import annotations

import pytest

from mllm_compile.runtime.ops.single_token_shapes import choose_blocks, is_taken


@pytest.mark.parametrize("columns", [256, 768, 1024, 2048, 2560, 3072, 4096, 5120, 11008, 12288, 14336, 28672])
@pytest.mark.parametrize("kind", [{}, {"is_normed": True}, {"is_gated": True}])
def test_a_weight_that_is_taken_divides_into_blocks_of_powers_of_two(columns, kind):
    assert is_taken(4, columns)
    blocks = choose_blocks(columns, **kind)
    assert columns % blocks.columns == 0 == 4 % blocks.rows
    assert blocks.columns & (blocks.columns - 1) == 0
    assert blocks.rows * blocks.columns >= 32 * blocks.num_warps, "every thread has something to load"


@pytest.mark.parametrize(("rows", "columns"), [(6, 1024), (1024, 128), (1024, 1000), (2**18, 2**13)])
def test_what_does_not_divide_is_left_to_the_library(rows, columns):
    assert not is_taken(rows, columns)
