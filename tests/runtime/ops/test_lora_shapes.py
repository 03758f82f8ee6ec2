"""The blocks of adapters' kernels: what shared memory holds of them."""

from __future__ import annotations

import pytest

from mllm_compile.runtime.ops.lora.shapes import WRITTEN_TOKENS, stages_of

SHARED_BYTES = {"A100": 163 << 10, "L40S": 99 << 10, "H200": 227 << 10}
COLUMNS = 128


@pytest.mark.parametrize("gpu", SHARED_BYTES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_further_ranks_of_b_that_are_under_way_fit_the_shared_memory(gpu, itemsize):
    for rank in (72, 128, 250, 512):
        stages = stages_of(rank, COLUMNS, itemsize, SHARED_BYTES[gpu])
        under_way = (stages - 1) * rank * (COLUMNS + WRITTEN_TOKENS) * itemsize
        assert 1 <= stages <= 3
        assert under_way < SHARED_BYTES[gpu]


def test_stages_are_three_where_shared_memory_has_them():
    found = [stages_of(rank, COLUMNS, 2, SHARED_BYTES["H200"]) for rank in (8, 64, 128, 256, 512)]
    assert found == [3, 3, 3, 3, 2]
    assert [stages_of(rank, COLUMNS, 4, SHARED_BYTES["L40S"]) for rank in (64, 128, 512)] == [3, 1, 1]
