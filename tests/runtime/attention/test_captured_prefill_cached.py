"""Lists and pages of captured prompts that go on from the cache: their places, and batches without them (the rest:
tests/gpu/test_cached_prefill_graphs.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.captured.prefill_cached import CachedPrefillSteps
from mllm_compile.runtime.attention.flashinfer.work_list import SplitList, WorkList
from mllm_compile.runtime.attention.metadata import StepPrompts

PAGE = 16


class Group:
    """Notes what is captured of it; serves few keys well by fa3."""

    def __init__(self, heads: tuple[int, int, int]) -> None:
        self.heads = heads
        self.works = WorkList.short(heads[0], heads[2], 132)

    def split_list(self, num_tokens: int, most_rows: int) -> SplitList:
        return SplitList(num_tokens, self.heads, PAGE, 264, most_rows)

    def capture_pages(self, num_tokens: int, works, place: torch.Tensor, page_ids: torch.Tensor):
        assert place.numel() >= works.num_bytes and place.data_ptr() % 16 == 0
        return num_tokens, works, place, page_ids

    def runs_well_captured(self, query_lens: np.ndarray, prefix_lens: np.ndarray) -> bool:
        return bool(prefix_lens.max() < 1000)


def prompts(*lengths: tuple[int, int]) -> StepPrompts:
    """Of these new and cached tokens; a page's id is its place among all."""
    new, cached = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    pages = int((-(-(new + cached) // PAGE)).sum())
    starts = np.array([0, *np.cumsum(new)], dtype=np.int32)
    rows = np.arange(1, 1 + len(new))
    return StepPrompts(starts, cached, rows, rows, lambda: np.arange(pages, dtype=np.int32))


@pytest.fixture
def captured():
    """The steps, and what was captured of 64 and 192 tokens."""
    groups = [Group((32, 8, 128)), Group((4, 2, 64))]
    steps = CachedPrefillSteps(groups, [group.works for group in groups], PAGE)
    work = torch.full((steps.work_bytes,), 77, dtype=torch.uint8)
    return steps, work, {size: steps.capture(size, work) for size in (64, 192)}


def test_each_group_s_kernels_find_their_list_and_all_find_the_pages(captured):
    steps, work, wrappers = captured
    memory = work.numpy()
    for size, kind, step in (
        (64, SplitList, prompts((16, 1984), (3, 0))),
        (192, WorkList, prompts((160, 900), (9, 33))),
    ):
        assert steps.write(size, memory, step)
        places = [place.data_ptr() for _, _, place, _ in wrappers[size]]
        assert len(set(places)) == 2
        for num_tokens, works, place, page_ids in wrappers[size]:
            assert num_tokens == size and isinstance(works, kind)
            alone = np.zeros(place.numel() // 4, dtype=np.int32)
            first_pages = np.array([0, *np.cumsum(-(-step.num_keys // PAGE))], dtype=np.int32)
            assert works.write(alone, step.starts, first_pages, step.num_keys)
            written = alone != 0
            assert (place.numpy().view(np.int32)[written] == alone[written]).all()
            count = int(first_pages[-1])
            assert page_ids[:count].tolist() == list(range(count))


def test_what_there_is_no_room_for_or_no_good_kernel_is_left_to_others(captured):
    steps, work, _ = captured
    memory = work.numpy()
    assert steps.write(64, memory, prompts((10, 32_000)))
    assert not steps.write(64, memory, prompts((10, 33_000))), "its pages are too many"
    assert not steps.write(64, memory, prompts(*[(1, 16)] * 33)), "so are they"
    assert steps.write(192, memory, prompts((150, 900)))
    assert not steps.write(192, memory, prompts((150, 1000))), "fa3 would take longer"
