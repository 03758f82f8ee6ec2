"""Chooses the decodes of a step, and whom to preempt so that each has a page for its token.

All decodes move, or of pipeline stages those whose turn it is. When pages run out the least urgent running request is
preempted, one after another. If pages of ending requests come back anyway, decodes sit out instead. The most urgent
request always moves. lifecycle.py does what is decided here. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mllm_compile.runtime.schedule.batch_builder import RunningDecodes
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.decodes import Decodes
from mllm_compile.runtime.schedule.prompts import Prompts
from mllm_compile.runtime.schedule.request import Request, by_urgency
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.stage_turns import StageTurns


class Preemption:
    """See the module's header.

    Args:
        preempt: sends a running request back to the queue.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rows: Rows,
        prompts: Prompts,
        decodes: Decodes,
        preempt: Callable[[Request], None],
    ) -> None:
        self._rows, self._prompts, self._decodes, self._preempt = rows, prompts, decodes, preempt
        num_stages = config.pipeline_parallel_size
        self._turns = StageTurns(num_stages, rows.in_flight.size) if num_stages > 1 else None
        self._rope = config.rope if config.rope is not None and config.rope.recomputes else None

    def choose(self, *, has_drafts: bool) -> RunningDecodes:
        """The decodes of the next step, each with a page for its token.

        Args:
            has_drafts: decodes may have some, so steps of stages wait for each other.
        """
        if self._rope is not None:
            self._preempt_outgrown(self._rope.boundary)
        rows, pages, begun = self._rows, self._rows.pages, self._prompts.begun
        while True:
            decodes = self._decodes_of_step(has_drafts)
            if not decodes.requests and not begun:
                return decodes
            needy = rows.computed[decodes.rows] == pages.capacity[decodes.rows]
            num_needy = int(np.count_nonzero(needy))
            if num_needy == 0 and not begun:
                return decodes
            shortage = num_needy - pages.available_pages
            shortage_with_prefill = shortage + self._prompts.pages_of_first(decodes)
            if shortage_with_prefill <= 0:
                break
            victim = self._victim()
            if shortage <= 0 and victim is begun[0]:
                break  # the prompt itself is the least urgent: it takes what pages the decodes leave
            if victim is None or shortage_with_prefill <= rows.pages_coming_back():
                decodes = self._sit_out(decodes, needy)
                needy = rows.computed[decodes.rows] == pages.capacity[decodes.rows]
                break
            self._preempt(victim)
        pages.grow_each(decodes.rows[needy])
        return decodes

    def _decodes_of_step(self, has_drafts: bool) -> RunningDecodes:
        decodes = self._decodes.current()
        if self._turns is None or has_drafts:
            return decodes
        return self._turns.of_step(decodes, self._rows.in_flight)

    def _preempt_outgrown(self, boundary: int) -> None:
        """Preempt what the next step would take beyond the frequencies of its cached keys: these are computed anew."""
        decodes = self._decodes.current()
        for index in np.flatnonzero(self._rows.computed[decodes.rows] == boundary).tolist():
            if decodes.requests[index].rope_len <= boundary:
                self._preempt(decodes.requests[index])

    def _victim(self) -> Request | None:
        """The least urgent running request; None when there is but one."""
        running = self._prompts.begun + self._decodes.requests
        return max(running, key=by_urgency) if len(running) > 1 else None

    def _sit_out(self, decodes: RunningDecodes, needy: np.ndarray) -> RunningDecodes:
        """Leave out the least urgent of the decodes that need a page, as many as pages lack; theirs come soon."""
        without_page = sorted(
            (request for request, needs in zip(decodes.requests, needy.tolist(), strict=True) if needs), key=by_urgency
        )[self._rows.pages.available_pages :]
        out = set(without_page)
        return RunningDecodes.of([request for request in decodes.requests if request not in out]) if out else decodes
