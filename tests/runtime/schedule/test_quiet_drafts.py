"""Drafts that no step checks are told right as far as the request then gets their tokens."""

from __future__ import annotations

from mllm_compile.runtime.schedule import quiet_drafts
from mllm_compile.runtime.schedule.quiet_drafts import QuietDrafts
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.speculation.ngram import NgramGuesser
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.runtime.schedule.scheduler_simulation import make_request


def running(row: int) -> Request:
    """A request whose next tokens are guessed to be 6, 7, 8 and 5."""
    request = make_request(str(row), [5, 6, 7, 8, 5])
    request.row = row
    request.output_token_ids.append(6)
    return request


def told(quiet: QuietDrafts, *requests: Request) -> list[tuple[int, ...]]:
    """(row, drafted, right) of each draft that is told."""
    return [tuple(map(int, one)) for one in zip(*quiet.look(requests), strict=True)]


def quiet_drafts_of(most: int = 4) -> QuietDrafts:
    return QuietDrafts(TextDrafter(NgramGuesser(2, 4)), most)


def test_a_draft_is_told_when_its_tokens_have_come():
    quiet, request = quiet_drafts_of(), running(3)
    assert told(quiet, request) == []
    request.output_token_ids += [7, 8, 9, 9, 9, 9]
    assert told(quiet, request) == [(3, 4, 2)]
    request.output_token_ids += [9]
    assert told(quiet, request) == [(3, 1, 1)], "of four tokens one can be told"
    request.output_token_ids += [1, 2]
    told(quiet, request)
    request.output_token_ids += [3, 4]
    assert told(quiet, request) == [(3, 0, 0)], "there was no draft"


def test_a_request_that_is_over_or_another_in_its_row_has_no_draft_of_before():
    quiet, request, other = quiet_drafts_of(), running(3), running(3)
    told(quiet, request)
    other.output_token_ids += [7, 8]
    assert told(quiet, other) == []
    quiet.end(request)
    request.output_token_ids += [7, 8]
    assert told(quiet, request) == []
    assert told(quiet) == []


def test_of_many_requests_some_are_drafted_for_in_turn(monkeypatch):
    monkeypatch.setattr(quiet_drafts, "_AT_ONCE", 2)
    quiet, requests = quiet_drafts_of(), [running(row) for row in range(1, 6)]
    seen = []
    for _ in range(5):
        for request in requests:
            request.output_token_ids += [7, 8, 5, 6]
        rows = [row for row, _, _ in told(quiet, *requests)]
        assert len(rows) <= 2
        seen += rows
    assert set(seen) == {1, 2, 3, 4, 5}
