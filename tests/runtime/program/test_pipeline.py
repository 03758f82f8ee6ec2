"""A stage of a pipeline: where values are put, which tokens are waited for, and that a sender does not wait."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.config.schema_runtime import MAX_RANKS
from mllm_compile.runtime.collectives.stages import MOST_SENT
from mllm_compile.runtime.program.pipeline import Pipeline
from mllm_compile.runtime.program.spec import HandedValue
from mllm_compile.runtime.program.stages import StageProgram

HIDDEN = HandedValue("x", (1, -1, 4), "float32")


class Way:
    """A link whose two ends are in one process."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()

    def send(self, x: torch.Tensor) -> None:
        self.sent.append(x)

    def receive(self, x: torch.Tensor) -> None:
        x.copy_(self.sent.popleft())


def stage_of(
    stage: int, before: Way | None, behind: Way | None, tokens: dict[int, Way], num_stages: int = 2, **values: Any
) -> Pipeline:
    rank = num_stages - 1 - stage
    communicator: Any = SimpleNamespace(
        stage=stage, num_stages=num_stages, size=1, rank_of_all=rank, before=before, behind=behind, tokens=tokens
    )
    program = StageProgram(None, token_stages=frozenset([0]), **values)  # type: ignore[arg-type]
    return Pipeline(communicator, program, 8, torch.device("cpu"))


@pytest.fixture
def two() -> tuple[Pipeline, Pipeline, Way]:
    """The first stage and the last, and the way of tokens between them."""
    values, tokens = Way(), Way()
    first = stage_of(0, None, values, {1: tokens}, gives=(HIDDEN,))
    last = stage_of(1, values, None, {1: tokens}, takes=(HIDDEN,))
    return first, last, tokens


def test_values_of_any_step_are_at_one_address_and_may_be_written_over_by_their_sender(two):
    first, last, _ = two
    addresses = set()
    for count in (3, 8, 1):
        x = torch.randn(1, count, 4)
        expected = x.clone()
        first.give([x])
        x.zero_()
        taken = last.take(count)["x"]
        torch.testing.assert_close(taken, expected)
        addresses.add(taken.data_ptr())
    assert len(addresses) == 1
    with pytest.raises(ValueError, match="a step of 9 tokens; expected at most 8"):
        last.take(9)


def test_a_stage_waits_for_the_tokens_of_the_rows_that_a_step_needs_and_no_others(two):
    first, last, way = two
    ours, theirs = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for step, rows in enumerate(([1], [2], [3]), start=1):
        theirs[rows] = step
        last.sampled(np.array(rows), theirs)
        first.sampled(np.array(rows), ours)
    first.await_tokens(np.array([2]), ours)
    assert ours.tolist() == [0, 1, 2, 0] and len(way.sent) == 1
    first.await_tokens(np.array([1, 2]), ours)
    assert len(way.sent) == 1, "their tokens are there"
    last.await_tokens(np.array([3]), theirs)
    assert len(way.sent) == 1, "rank 0 has its own"


def test_tokens_that_nobody_needs_do_not_pile_up(two):
    first, last, way = two
    tokens = torch.zeros(4, dtype=torch.int64)
    for _ in range(20):
        last.sampled(np.array([1]), tokens)
        first.sampled(np.array([1]), tokens)
    assert len(way.sent) == 4


def test_tokens_that_wait_are_never_more_than_a_sender_sends_ahead():
    """Else rank 0 would wait for a stage that waits for rank 0's next steps."""
    way, tokens = Way(), torch.zeros(4, dtype=torch.int64)
    first, last = (stage_of(stage, None, None, {MAX_RANKS - 1: way}, MAX_RANKS) for stage in (0, MAX_RANKS - 1))
    for _ in range(3 * MAX_RANKS):
        first.sampled(np.array([1]), tokens)
        last.sampled(np.array([1]), tokens)
        assert len(way.sent) <= MOST_SENT
