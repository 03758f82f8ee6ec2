"""The drafts of a step's decodes: who may have one, and how long it may be.

A draft takes only tokens and pages that the step's prompts leave: none preempts a request, or holds a prompt up. It is
made while no step is in flight, when the host knows every token, and is used at once. So none outlives a preemption.
Free of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mllm_compile.runtime.schedule.batch_builder import NOTHING_DRAFTED, Drafted, RunningDecodes
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.speculation.drafter import RequestDrafter, Speculation

logger = logging.getLogger(__name__)

Draft = Sequence[int]


@dataclass(slots=True, eq=False)
class _Guesses:
    drafter: RequestDrafter
    num_taken: int = 0  # tokens of the output that the drafter has

    def take(self, request: Request) -> None:
        """Gives the drafter the newest tokens."""
        new = request.output_token_ids[self.num_taken :]
        if new:
            self.drafter.take(new)
            self.num_taken += len(new)


class Drafts:
    """See the module's header.

    Args:
        rows: what requests hold.
        boundary: tokens at which a request is computed anew (RopeLengths); None: at none.
    """

    def __init__(self, speculation: Speculation, rows: Rows, boundary: int | None) -> None:
        self._speculation, self._rows, self._boundary = speculation, rows, boundary
        self._guesses: dict[Request, _Guesses] = {}
        self._told: set[str] = set()  # reasons in the log

    def may_draft(self, request: Request) -> bool:
        """False: the request is over, or gets no drafts, whatever its text."""
        reason = _obstacle(request)
        if reason is None:
            return request.status is RequestStatus.RUNNING
        if reason not in self._told:
            self._told.add(reason)
            logger.info("no tokens are drafted for requests with %s", reason)
        return False

    def plan(self, decodes: RunningDecodes, num_tokens: int) -> Drafted:
        """The drafts of these decodes, with their pages taken.

        Args:
            num_tokens: most tokens of all.
        """
        drafts: list[Draft] = []
        for request in decodes.requests:
            draft = self._draft(request, min(num_tokens, self._room(request))) if self.may_draft(request) else ()
            num_tokens -= len(draft)
            drafts.append(draft)
        return Drafted.of(decodes.requests, drafts) if any(drafts) else NOTHING_DRAFTED

    def end(self, request: Request) -> None:
        """Forgets a request that is over."""
        guesses = self._guesses.pop(request, None)
        if guesses is not None:
            guesses.take(request)
            guesses.drafter.end()

    def _room(self, request: Request) -> int:
        """Most tokens of a draft, pages aside: the token behind it has room, too."""
        most = min(self._speculation.num_tokens, request.max_new_tokens - len(request.output_token_ids) - 1)
        if self._boundary is None:
            return most
        computed = int(self._rows.computed[request.row])
        return min(most, self._boundary - computed - 1) if computed < self._boundary else most

    def _draft(self, request: Request, most: int) -> Draft:
        rows, row = self._rows, request.row
        pages = rows.pages
        most = min(
            most, int(pages.capacity[row]) + pages.available_pages * pages.page_size - int(rows.computed[row]) - 1
        )
        if most < 1:
            return ()
        draft = self._proposed(request, most)
        if draft:
            end = int(rows.computed[row]) + 1 + len(draft)
            pages.grow(row, pages.pages_for(end) - int(pages.num_pages[row]))
        return draft

    def _proposed(self, request: Request, most: int) -> Draft:
        guesses = self._guesses.get(request)
        if guesses is None:
            drafter = self._speculation.drafter.begin(request.prompt_token_ids, request.cache_salt)
            guesses = self._guesses[request] = _Guesses(drafter)
        guesses.take(request)
        draft = list(guesses.drafter.propose(most)[:most])
        vocab_size = self._speculation.vocab_size
        wrong = next((place for place, token in enumerate(draft) if not 0 <= token < vocab_size), None)
        if wrong is not None:
            del draft[wrong:]
        if self._speculation.fills:
            draft += request.output_token_ids[-1:] * (most - len(draft))
        return draft


def _obstacle(request: Request) -> str | None:
    """Why a request gets no drafts."""
    if request.grammar is not None:
        return "structured_outputs"
    if request.had_broken_draft:
        return "a draft whose logits were no numbers"
    return None
