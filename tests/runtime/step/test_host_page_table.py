import numpy as np
import pytest

from mllm_compile.runtime.step.host_page_table import HostPageTable


def test_slots_follow_the_page_writes_of_each_row():
    table = HostPageTable(num_rows=4, max_tokens=10, page_size=4)
    table.write(np.array([1, 1, 3]), np.array([0, 1, 0]), np.array([9, 5, 2]))
    rows, positions = np.array([1, 1, 1, 3], dtype=np.int32), np.array([0, 3, 4, 1])
    slots = table.slots(rows, positions)
    assert slots.tolist() == [36, 39, 20, 9]
    assert slots.dtype == np.int64


def test_the_pages_of_rows_hold_their_tokens():
    table = HostPageTable(num_rows=4, max_tokens=12, page_size=4)
    table.write(np.array([2, 2, 2, 1]), np.array([0, 1, 2, 0]), np.array([9, 4, 7, 5]))
    assert table.pages_of(np.array([2, 1, 2]), np.array([5, 4, 9])).tolist() == [9, 4, 5, 9, 4, 7]


def test_a_page_written_again_is_the_new_one():
    table = HostPageTable(2, 4, 4)
    table.write(np.array([1]), np.array([0]), np.array([7]))
    table.write(np.array([1]), np.array([0]), np.array([3]))
    assert table.slots(np.array([1]), np.array([2])).tolist() == [14]


def test_the_last_page_of_a_row_may_be_partly_used():
    table = HostPageTable(2, max_tokens=9, page_size=4)
    table.write(np.array([1]), np.array([2]), np.array([6]))
    assert table.slots(np.array([1]), np.array([8])).tolist() == [24]


def test_the_slots_of_pages_come_one_page_after_another():
    table = HostPageTable(2, max_tokens=9, page_size=4)
    slots = table.slots_of(np.array([6, 2]))
    assert slots.tolist() == [24, 25, 26, 27, 8, 9, 10, 11]
    assert slots.dtype == np.int32


@pytest.mark.parametrize("shared", range(6))
def test_rows_share_pages_up_to_the_first_that_differs(shared):
    table = HostPageTable(5, max_tokens=24, page_size=4)
    for row in (1, 2, 4):
        pages = [*range(10, 10 + shared), *(20 + 10 * row + place for place in range(shared, 6))]
        table.write(np.full(6, row), np.arange(6), np.array(pages))
    rows = np.array([4, 1, 2])
    assert table.common_pages(rows, 6) == shared
    assert table.common_pages(rows, 3) == min(shared, 3)
    assert table.common_pages(rows[:1], 6) == 6
    assert table.common_pages(rows, 0) == 0


def test_slots_that_follow_each_other_are_known_by_the_first() -> None:
    table = HostPageTable(num_rows=2, max_tokens=24, page_size=4)
    table.write(np.full(6, 1), np.arange(6), np.array([5, 6, 7, 9, 8, 10]))
    assert [table.first_slot_in_a_row(1, count) for count in (1, 4, 5, 12)] == [20] * 4
    assert [table.first_slot_in_a_row(1, count) for count in (13, 16, 24)] == [None] * 3, "the last one is 5 pages on"
