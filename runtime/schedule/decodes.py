"""The requests that decode, and the arrays of their rows, which stay the same objects while the set does.

prompts.py decides which join; preemption.py chooses among them for a step. Free of torch.
"""

from __future__ import annotations

import numpy as np

from mllm_compile.runtime.schedule.batch_builder import NO_DECODES, RunningDecodes
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows


class Decodes:
    """The set of decoding requests. One joins with its prompt's last chunk, and leaves when its last step is planned.

    Attributes:
        requests: those in decode, in the order of their rows in a step; may hold some that have ended since the last
            call of `current`.
    """

    def __init__(self, rows: Rows) -> None:
        self.requests: list[Request] = []
        self._rows = rows
        self._made: RunningDecodes | None = None  # None: to be made anew

    def add(self, request: Request) -> None:
        """Let a request decode from the next step on."""
        self.requests = [*self.requests, request]
        self._made = None

    def note_end(self) -> None:
        """Note that a request may have ended or been preempted."""
        self._made = None

    def current(self) -> RunningDecodes:
        """All with steps left. The rows of those whose last step has been planned are leaving from here on."""
        decodes = self._made
        if decodes is None:
            running = RequestStatus.RUNNING  # looking it up in its class takes longer than all else of the loop
            decoding = [request for request in self.requests if request.status is running]
            decodes = self._keep(self._ordered(decoding) if len(decoding) > 1 else decoding)
        if not decodes.requests:
            return decodes
        done = self._rows.computed[decodes.rows] >= self._rows.last_computed[decodes.rows]
        if done.any():
            # Their last step is in flight; its update ends them.
            self._rows.leaving.update(decodes.rows[done].tolist())
            left = [r for r, is_done in zip(decodes.requests, done.tolist(), strict=True) if not is_done]
            decodes = self._keep(left)
        return decodes

    def _keep(self, requests: list[Request]) -> RunningDecodes:
        self.requests = requests
        self._made = RunningDecodes.of(requests) if requests else NO_DECODES
        return self._made

    def _ordered(self, requests: list[Request]) -> list[Request]:
        """Sorts for attention, longest first: its blocks begin so, and a long one that begins last is waited for alone.

        Those of an adapter are neighbours, the adapter with the longest first: kernels take neighbours with one adapter
        together. All grow alike from then on, except requests that sit out.
        """
        lengths = self._rows.computed[[request.row for request in requests]]
        slots = [request.adapter_slot for request in requests]
        order = np.argsort(-lengths, kind="stable")
        if len(set(slots)) > 1:
            _, firsts, groups = np.unique(np.array(slots)[order], return_index=True, return_inverse=True)
            order = order[np.argsort(firsts[groups], kind="stable")]
        return [requests[index] for index in order.tolist()]
