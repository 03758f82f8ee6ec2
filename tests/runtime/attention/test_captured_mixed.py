"""Captured attention's inputs of a batch; its kernels only note them here (tests/gpu/test_mixed_graphs.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.attention.captured import mixed
from mllm_compile.runtime.attention.captured.mixed import MixedSteps
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from tests.runtime.attention.attention_cases import make_case, make_layer

MOST_REQUESTS = 6


class Decodes:
    def plan(self, rows):
        self.lengths = rows.seq_lens
        return self


class Prefill:
    def plan(self, starts: np.ndarray, num_keys: np.ndarray, first_row: int = 0) -> None:
        self.starts, self.num_keys, self.first_row = starts.tolist(), num_keys.tolist(), first_row


class Prefills:
    def __init__(self) -> None:
        self.captured: dict[int, Prefill] = {}

    def capture(self, num_tokens: int, page_table: torch.Tensor) -> Prefill:
        self.rows = page_table.shape[0]
        return self.captured.setdefault(num_tokens, Prefill())


class Space:
    page_table = torch.zeros(MOST_REQUESTS, 4, dtype=torch.int32)

    def __init__(self) -> None:
        self.listed: list[int] = []

    def list_pages(self, rows: torch.Tensor) -> None:
        self.listed = rows.tolist()


@pytest.fixture
def parts() -> tuple[MixedSteps, Decodes, Prefills, Space]:
    decodes, prefills, space = Decodes(), Prefills(), Space()
    return MixedSteps([decodes], [prefills], space, MOST_REQUESTS, torch.device("cpu")), decodes, prefills, space


def replay(steps: MixedSteps, size: int, new: list[int], prefix: list[int]) -> int:
    """Returns the number of decodes."""
    batch = make_case(make_layer(), prefix, new).batch
    common = CommonAttentionMetadata.of(batch)
    num_decodes, *_ = split_decodes_and_prefills(common)
    steps.replay(size, common, batch.req_pool_indices)
    return num_decodes


def test_a_captured_step_has_as_many_rows_as_it_may_have_requests_and_nothing_to_do(parts):
    steps, decodes, prefills, _ = parts
    for size, rows in ((4, 4), (40, MOST_REQUESTS)):
        assert steps.capture(size).num_rows == prefills.rows == rows
        assert decodes.lengths.tolist() == [0] * rows
        assert (prefills.captured[size].starts, prefills.captured[size].num_keys) == ([0], [])


def test_decodes_padding_and_prompts_are_each_left_to_whom_they_belong(parts):
    steps, decodes, prefills, _ = parts
    steps.capture(40)
    assert replay(steps, 40, [1, 1, 7, 4], [5, 30, 0, 9]) == 2
    assert decodes.lengths.tolist() == [6, 31, 0, 0, 0, 0]
    planned = prefills.captured[40]
    assert (planned.starts, planned.num_keys, planned.first_row) == ([2, 9, 13], [7, 13], 2)


def test_a_step_is_held_up_to_the_largest_that_was_captured(parts):
    steps, *_ = parts
    assert not steps.holds(1)
    for size in (64, 40):
        steps.capture(size)
    assert steps.holds(64) and not steps.holds(65)


@pytest.mark.parametrize(("most_listed", "by_the_capture"), [(4 * MOST_REQUESTS, True), (4 * MOST_REQUESTS - 1, False)])
def test_pages_are_listed_by_the_capture_or_ahead_of_it_where_they_may_be_many(
    parts, monkeypatch, most_listed, by_the_capture
):
    monkeypatch.setattr(mixed, "_MOST_LISTED", most_listed)
    steps, _, _, space = parts
    steps.capture(40)
    steps.begin(40, torch.arange(9))
    assert space.listed == (list(range(MOST_REQUESTS)) if by_the_capture else [])
    space.listed = []
    replay(steps, 40, [1, 1, 7, 4], [5, 30, 0, 9])
    assert len(space.listed) == (0 if by_the_capture else 4)


@given(data=st.data())
def test_after_any_batches_each_row_has_what_the_last_one_says(data):
    decodes, prefills = Decodes(), Prefills()
    steps = MixedSteps([decodes], [prefills], Space(), MOST_REQUESTS, torch.device("cpu"))
    steps.capture(64)
    for _ in range(data.draw(st.integers(1, 4))):
        new = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=MOST_REQUESTS))
        new.sort(key=lambda count: count > 1)
        prefix = [data.draw(st.integers(0, 20)) for _ in new]
        count = replay(steps, 64, new, prefix)
        total = [n + p for n, p in zip(new, prefix, strict=True)]
        assert decodes.lengths.tolist() == total[:count] + [0] * (MOST_REQUESTS - count)
        planned = prefills.captured[64]
        assert np.diff(planned.starts).tolist() == new[count:]
        assert planned.starts[0] == planned.first_row == count and planned.starts[-1] == sum(new)
        assert planned.num_keys == total[count:]
