"""Verify steps that are planned before the tokens of the last one are known: the device drafts, and counts.

The host knows bounds alone: `Rows.computed` is the most that a request may have, until its steps are updated. Pages are
taken for the most. A request whose length might end it in a step in flight sits out until that is known. So a bound
never reaches `last_computed`, but where it is exact.

Such steps are of decodes alone, without grammars. Whatever else is to be done waits until no step is in flight, and all
is known (scheduler.py). Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.schedule.batch_builder import NO_DECODES, Drafted, RunningDecodes
from mllm_compile.runtime.schedule.draft_depths import DraftDepths
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.scheduled_batch import NO_DRAFTS
from mllm_compile.runtime.speculation.drafter import Speculation


@dataclass(frozen=True, slots=True, eq=False)
class AheadPlan:
    """A step, with its pages taken.

    Attributes:
        drafted: the tokens that each decode may get.
    """

    decodes: RunningDecodes
    drafted: Drafted


class Ahead:
    """See the module's header.

    Args:
        rows: what requests hold.
        most_tokens: of a step.
        depths: chooses how long drafts may be; None: they have as many tokens as speculation says.
    """

    def __init__(self, speculation: Speculation, rows: Rows, most_tokens: int, depths: DraftDepths | None) -> None:
        self._captured, self._longest = speculation.captured, speculation.num_tokens
        self._keys_ahead = speculation.keys_ahead
        self._rows, self._most_tokens, self._depths = rows, most_tokens, depths
        # The last decodes that were looked at, whether all may be in such a step, and the longest draft of each.
        self._seen: tuple[RunningDecodes, bool, np.ndarray] = (NO_DECODES, False, NO_DECODES.rows)

    def plan(self, decodes: RunningDecodes) -> AheadPlan | None:
        """The next step of these decodes; None: it cannot be of this kind."""
        is_served, longest = self._look_at(decodes)
        if not is_served:
            return None
        rows, indices = self._rows, decodes.rows
        if self._depths is not None:
            longest = self._depths.of_rows(indices)
            fitting = [depth for depth, most in self._captured.items() if most >= len(decodes.requests)]
            longest = np.minimum(longest, max(fitting, default=0))
            if not longest.any():
                return None
        room = rows.last_computed[indices] - 2 - rows.computed[indices]
        is_known = rows.in_flight[indices] == 0
        is_in = (room >= 0) | (is_known & (room == -1))
        if not is_in.all():
            decodes = RunningDecodes.of([r for r, stays in zip(decodes.requests, is_in.tolist(), strict=True) if stays])
            indices, room, is_known, longest = decodes.rows, room[is_in], is_known[is_in], longest[is_in]
        num_new = 1 + np.minimum(np.maximum(room, 0), longest)
        if not decodes.requests or int(num_new.sum()) > self._most_tokens:
            return None
        computed = rows.computed[indices]
        most = rows.pages.table.shape[1] * rows.pages.page_size
        if not self._take_pages(indices, np.minimum(computed + num_new + self._keys_ahead, most)):
            return None
        lengths = np.where(is_known, computed, -1).astype(np.int32)
        return AheadPlan(decodes, Drafted(NO_DRAFTS, num_new.astype(np.int32), lengths))

    def _look_at(self, decodes: RunningDecodes) -> tuple[bool, np.ndarray]:
        if self._seen[0] is not decodes:
            requests = decodes.requests
            most = max(self._captured.values())
            is_served = 0 < len(requests) <= most and all(map(may_be_ahead, requests))
            longest = [0 if request.had_broken_draft else self._longest for request in requests]
            self._seen = decodes, is_served, np.array(longest, dtype=np.int32)
        return self._seen[1], self._seen[2]

    def _take_pages(self, rows: np.ndarray, lengths: np.ndarray) -> bool:
        """Takes the pages that rows lack for so many tokens; False: there are too few, and none are taken."""
        pages = self._rows.pages
        lacking = -(-lengths // pages.page_size) - pages.num_pages[rows]
        lacking[lacking < 0] = 0
        if not lacking.any():
            return True
        if int(lacking.sum()) > pages.available_pages:
            return False
        pages.grow_each(rows[lacking == 1])
        for place in np.flatnonzero(lacking > 1).tolist():
            pages.grow(int(rows[place]), int(lacking[place]))
        return True


def may_be_ahead(request: Request) -> bool:
    """True if a request's step can be planned by bounds: the host needs none of its tokens."""
    return request.grammar is None
