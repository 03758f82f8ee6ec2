from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.schedule.pages import allocator as allocator_module
from mllm_compile.runtime.schedule.pages.allocator import TokenToKVPoolAllocator


def test_the_dummy_page_is_never_handed_out() -> None:
    allocator = TokenToKVPoolAllocator(num_pages=5, page_size=16)
    assert allocator.usable_pages == allocator.available_pages == 4
    pages = allocator.allocate(4)
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == [1, 2, 3, 4]
    assert allocator.available_pages == 0


def test_more_than_is_free_is_an_internal_error_and_takes_nothing() -> None:
    allocator = TokenToKVPoolAllocator(num_pages=4, page_size=1)
    with pytest.raises(RuntimeError, match="4 KV pages asked of an allocator with 3 free pages"):
        allocator.allocate(4)
    assert allocator.available_pages == 3


@pytest.mark.parametrize(
    "pages",
    [[1, 1], [3], [0], [-1], [9], [1, 3]],
    ids=["listed twice", "never handed out", "dummy", "negative", "beyond the pool", "one of two is free"],
)
def test_freeing_what_is_not_handed_out_is_an_internal_error_and_frees_nothing(pages: list[int]) -> None:
    allocator = TokenToKVPoolAllocator(num_pages=9, page_size=1)
    assert allocator.allocate(2).tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="internal error: KV pages"):
        allocator.free(np.array(pages))
    assert allocator.available_pages == 6
    allocator.free(np.array([2, 1]))
    assert allocator.available_pages == 8


def test_pages_that_come_back_to_the_last_are_handed_out_last() -> None:
    allocator = TokenToKVPoolAllocator(num_pages=7, page_size=1)
    pages = allocator.allocate(3)
    allocator.free(pages[:2], to_the_last=True)
    allocator.free(pages[2:])
    assert [allocator.allocate(1).item() for _ in range(4)] == [3, 4, 5, 6]
    assert sorted(allocator.allocate(2).tolist()) == [1, 2]


def test_freeing_twice_is_an_internal_error() -> None:
    allocator = TokenToKVPoolAllocator(num_pages=9, page_size=1)
    pages = allocator.allocate(3)
    allocator.free(pages)
    with pytest.raises(RuntimeError, match="freed, but not handed out"):
        allocator.free(pages[:1])


def test_the_pages_behind_one_are_given_where_all_of_them_are_free() -> None:
    allocator = TokenToKVPoolAllocator(num_pages=12, page_size=1)
    assert allocator.allocate(2).tolist() == [1, 2]
    assert allocator.allocate_behind(5, 3).tolist() == [6, 7, 8]
    assert allocator.allocate_behind(8, 3).tolist() == [9, 10, 11]
    for page, count in ((2, 4), (4, 2), (11, 1), (9, 5)):
        assert allocator.allocate_behind(page, count) is None
    assert allocator.available_pages == 3
    assert sorted(allocator.allocate(3).tolist()) == [3, 4, 5]


def test_runs_of_pages_are_set_aside_from_the_last_on_and_never_twice() -> None:
    allocator = TokenToKVPoolAllocator(num_pages=12, page_size=1)
    allocator.allocate_behind(6, 1)
    first, second, third = (allocator.set_aside(count) for count in (3, 4, 2))
    assert (first, second, third) == (range(9, 12), range(3, 7), range(1, 3))
    assert allocator.set_aside(2) is None, "one page is left between them"
    allocator.end_setting_aside(first)
    assert allocator.set_aside(4) == range(8, 12)
    assert allocator.allocate(10).tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11], "whoever needs them takes them"


@settings(max_examples=100)
@given(st.integers(2, 20), st.lists(st.tuples(st.integers(-10, 10), st.booleans()), max_size=60))
def test_any_sequence_hands_out_what_a_list_of_pages_would(num_pages: int, changes: list[tuple[int, bool]]) -> None:
    with patch.object(allocator_module, "_LOOKED_AT", 2):
        check_order(TokenToKVPoolAllocator(num_pages, page_size=4), changes)


def check_order(allocator: TokenToKVPoolAllocator, changes: list[tuple[int, bool]]) -> None:
    free, held = list(range(1, allocator.num_pages)), []  # the first ones are the next
    for change, is_other in changes:
        behind = change // 2
        if change > 5 and is_other and (pages := allocator.allocate_behind(behind, 2)) is not None:
            assert pages.tolist() == [behind + 1, behind + 2]
            for page in pages.tolist():
                free.remove(page)
            held += pages.tolist()
        elif 0 <= change <= len(free):
            pages = allocator.allocate(change)
            assert pages.dtype == np.int32 and pages.tolist() == free[:change]
            free, held = free[change:], held + free[:change]
        elif change < 0:
            back, held = held[:-change], held[-change:]
            allocator.free(np.array(back, dtype=np.int32), to_the_last=is_other)
            free = free + back[::-1] if is_other else back[::-1] + free
        assert allocator.available_pages == len(free)
        assert sorted(held) == np.flatnonzero(allocator.taken).tolist()
