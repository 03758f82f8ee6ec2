"""Deals decodes among the steps that the stages of a pipeline have in flight. Free of torch.

A request's next step needs the token of its last one. So requests are dealt into as many groups as there are stages.
Groups take turns: while the last stage computes one, the first computes the next.
"""

from __future__ import annotations

import numpy as np

from mllm_compile.runtime.schedule.batch_builder import NO_DECODES, RunningDecodes


class StageTurns:
    """The groups of one scheduler's decodes, which stay the same while no request comes or goes."""

    def __init__(self, num_stages: int, num_rows: int) -> None:
        """
        Args:
            num_rows: rows of requests are below it.
        """
        self._num_stages = num_stages
        self._group_of = np.full(num_rows, -1, dtype=np.int64)  # of rows; -1: no decode has it
        self._dealt: RunningDecodes | None = None
        self._groups: list[RunningDecodes] = []
        self._turn = 0

    def of_step(self, decodes: RunningDecodes, in_flight: np.ndarray) -> RunningDecodes:
        """The decodes of the next step; none while all are in steps that are under way. One alone is in every step, as
        the first stage may wait for its token.

        Args:
            in_flight: [rows] of each row how many steps are under way.
        """
        if len(decodes.requests) < 2:
            return decodes
        if decodes is not self._dealt:
            self._deal(decodes)
        for index in range(len(self._groups)):
            turn = (self._turn + index) % len(self._groups)
            if not in_flight[self._groups[turn].rows].any():
                self._turn = turn + 1
                return self._groups[turn]
        is_free = in_flight[decodes.rows] == 0  # some of each group, where requests have come or gone
        if not is_free.any():
            return NO_DECODES
        return RunningDecodes.of([decodes.requests[place] for place in np.flatnonzero(is_free).tolist()])

    def _deal(self, decodes: RunningDecodes) -> None:
        """Deals anew: requests stay in their groups, but for those that make groups alike."""
        rows, before = decodes.rows, self._group_of[decodes.rows]
        counts = np.bincount(before[before >= 0], minlength=self._num_stages)
        most = -(-rows.size // self._num_stages)
        for place in range(rows.size):
            if before[place] >= 0 and counts[before[place]] > most:
                counts[before[place]] -= 1
                before[place] = -1
        for place in np.flatnonzero(before < 0).tolist():
            before[place] = counts.argmin()
            counts[before[place]] += 1
        self._group_of[:] = -1
        self._group_of[rows] = before
        parts = (np.flatnonzero(before == group).tolist() for group in range(self._num_stages))
        self._groups = [RunningDecodes.of([decodes.requests[place] for place in part]) for part in parts if part]
        self._dealt = decodes
