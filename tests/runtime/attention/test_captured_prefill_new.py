"""The lists of captured prompts: their places, and batches without them (the rest: tests/gpu/test_mixed_graphs.py)."""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.attention.captured.prefill_new import NewPrefillSteps
from mllm_compile.runtime.attention.flashinfer.work_list import WorkList

LISTS = [WorkList.short(4, 128, 20), WorkList.short(2, 64, 20)]


class Group:
    def capture_in_a_row(self, num_tokens: int, works: WorkList, place: torch.Tensor) -> tuple[int, WorkList, int]:
        return num_tokens, works, place.data_ptr()


def pieces(works: WorkList, memory: np.ndarray) -> list[tuple[int, ...]]:
    """(tile, first query, first key, queries, keys, head, prompt) of each block that has one."""
    *columns, bounds, prompts = (memory.view(np.int32)[offset // 4 :] for offset in works.layout[:8])
    count = int(bounds[20])
    assert bounds[:21].tolist() == [min(block, count) for block in range(21)]
    return [tuple(int(column[piece]) for column in (*columns, prompts)) for piece in range(count)]


def test_each_group_s_kernels_find_its_list_where_it_is_written():
    steps = NewPrefillSteps([Group(), Group()], LISTS)
    assert steps.work_bytes == sum(works.num_bytes for works in LISTS)
    work = torch.full((steps.work_bytes,), 77, dtype=torch.uint8)
    captured = steps.capture(512, work)
    places = [place - work.data_ptr() for *_, place in captured]
    assert [entry[:2] for entry in captured] == [(512, works) for works in LISTS]
    assert places == [0, LISTS[0].num_bytes] and all(place % 16 == 0 for place in places)
    memory = work.numpy()
    assert steps.write(memory, np.array([0, 200, 210], dtype=np.int32))
    of_first, of_second = (pieces(works, memory[place:]) for works, place in zip(LISTS, places, strict=True))
    assert len(of_first) == 3 * 4 and len(of_second) == 3 * 2  # heads of 64 have tiles of 192
    assert set(of_first[:3]) == {(0, 0, 0, 200, 200, 0, 0), (1, 0, 0, 200, 200, 0, 0), (0, 200, 200, 10, 10, 0, 1)}


def test_prompts_of_more_pieces_than_there_are_blocks_have_no_list():
    steps = NewPrefillSteps([Group(), Group()], LISTS)
    memory = np.zeros(steps.work_bytes, dtype=np.uint8)
    assert steps.write(memory, np.arange(0, 60, 10, dtype=np.int32))
    assert not steps.write(memory, np.arange(0, 70, 10, dtype=np.int32))
