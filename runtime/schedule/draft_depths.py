"""The depths of a scheduler's drafts by cost: tells what it plans, and what became of it, to speculation/depth.py.

While drafts are off the scheduler plans steps ahead as ever, and asks at times whether they would pay. What tries of
them cost in truth, with the waits around them, is bounded by trial_budget.py. Free of torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns
from mllm_compile.runtime.schedule.trial_budget import TrialBudget
from mllm_compile.runtime.speculation.acceptance_rates import HOPE
from mllm_compile.runtime.speculation.depth import DepthByCost

# Steps until depths are chosen anew: while drafts are off, and while they are accepted. It takes as long as a draft.
_OFF_STEPS, _ON_STEPS = 8, 4


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """A step that was planned.

    Attributes:
        num_tokens: its tokens if it is without prompts, else 0; of a captured step with padding.
        is_ahead: it was planned while the one before was in flight.
        is_on_device: the device makes its drafts.
        depths: [decodes] int: most tokens of each draft; None: none were asked for.
        is_tried: drafts were asked for, or it waited for a step for which they were.
    """

    step_id: int
    num_tokens: int
    is_ahead: bool
    is_on_device: bool
    depths: np.ndarray | None
    is_tried: bool


class DraftDepths:
    """See the module's header.

    Args:
        num_rows, most, most_in_step, hope: as DepthByCost takes them.
        captured: as Speculation has them.

    Attributes:
        is_on: some request gets drafts in the next step.
    """

    def __init__(
        self, num_rows: int, most: int, most_in_step: int, captured: Mapping[int, int], hope: float = HOPE
    ) -> None:
        self.is_on = False
        self._captured = captured
        self._by_cost = DepthByCost(num_rows, most, most_in_step, hope)
        self._budget = TrialBudget()
        self._depths = np.zeros(num_rows, dtype=np.int64)
        self._planned: deque[_Planned] = deque(maxlen=4)  # more than are in flight
        self._num_steps = 0  # planned since depths were chosen
        self._was_in_vain = False  # a draft since then
        self._newest_ms = 0.0  # of the step that was taken in last
        self._on_device = False  # the device makes the drafts that were chosen last

    def of(self, request: Request) -> int:
        """Most tokens of a running request's draft."""
        return int(self._depths[request.row])

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """The same of the requests in rows [n]: [n] int64."""
        of_rows: np.ndarray = self._depths[rows]
        return of_rows

    def is_due(self, in_flight: bool) -> bool:
        """Depths are to be chosen for the next step; where the host makes drafts, as soon as all tokens are known."""
        if self._num_steps >= _OFF_STEPS:
            return True
        if self._on_device:
            return self.is_on and self._num_steps >= _ON_STEPS
        return self.is_on and not in_flight and (self._was_in_vain or self._num_steps >= _ON_STEPS)

    def choose(self, requests: Sequence[Request], num_decodes: int, most: int) -> None:
        """Chooses up to `most` for each of these requests, which may have drafts, among the next step's decodes."""
        rows = _rows_of(requests)
        self._take(rows, self._by_cost.choose(rows, num_decodes, most) if self._budget.is_left else None)

    def choose_alike(
        self, requests: Sequence[Request], num_decodes: int, depths: Sequence[int], *, on_device: bool
    ) -> None:
        """Chooses one of `depths`, or none, for all of them: steps of these are captured."""
        rows, depth = _rows_of(requests), 0
        if self._budget.is_left:
            depth = self._by_cost.choose_alike(rows, num_decodes, depths, on_device=on_device)
        self._take(rows, depth or None, on_device=on_device)

    def _take(self, rows: np.ndarray, depths: np.ndarray | int | None, *, on_device: bool = False) -> None:
        self.is_on, self._num_steps, self._was_in_vain = depths is not None, 0, False
        self._on_device = on_device
        self._depths[:] = 0
        if depths is not None:
            self._depths[rows] = depths

    def learn(self, rows: np.ndarray, num_drafted: np.ndarray, num_right: np.ndarray) -> None:
        """Learns of drafts [n] that no step checked, as AcceptanceRates.learn does of others."""
        if rows.size:
            self._by_cost.rates.learn(rows, num_drafted, num_right)
            self._budget.see(float(num_right.mean()))

    def planned(self, batch: ScheduledBatch, is_ahead: bool) -> None:
        """A step was planned."""
        if batch.admitted:
            rows = _rows_of(batch.admitted)
            self._by_cost.rates.forget(rows)
            self._depths[rows] = 0
        self._by_cost.rates.pass_step()
        self._num_steps += 1
        depths, is_on_device = None, batch.device_lens is not None
        if self.is_on and (is_on_device or not is_ahead):
            depths = self._depths[batch.rows[: batch.num_decodes]]
        num_tokens = 0 if batch.num_prompt_tokens else self._with_padding(batch)
        last = self._planned[-1] if self._planned else None
        is_tried = depths is not None or (not is_ahead and last is not None and last.depths is not None)
        self._planned.append(_Planned(batch.step_id, num_tokens, is_ahead, is_on_device, depths, is_tried))

    def took(self, batch: ScheduledBatch, ms: float) -> None:
        """A step took `ms` from the end of the one before."""
        step, following = self._find(batch.step_id), self._find(batch.step_id + 1)
        self._newest_ms = ms
        if step is None or not step.num_tokens:
            return
        # On a CPU a step that is planned ahead has run when the one before is seen to end. So its time counts where
        # the one behind it, which then ran instead, is like it.
        num_drafted = step.num_tokens - batch.num_decodes
        if step.is_ahead != (following is not None):
            return
        if following is not None and following.num_tokens != step.num_tokens:
            return
        by_cost = self._by_cost
        if step.is_on_device:
            by_cost.times_on_device.learn(batch.num_decodes, num_drafted, ms)
            return
        is_plain = step.is_ahead and not num_drafted
        by_cost.times.learn(batch.num_decodes, None if is_plain else num_drafted, ms)
        if is_plain:
            by_cost.times_on_device.learn(batch.num_decodes, None, ms)

    def checked(self, batch: ScheduledBatch, runs: TokenRuns | None) -> None:
        """Learns how much of a step's drafts was accepted.

        Args:
            runs: its tokens; None: nothing was drafted.
        """
        step = self._find(batch.step_id)
        if step is None:
            return
        if step.num_tokens:
            num_tokens = batch.num_decodes if runs is None else int(runs.counts[: batch.num_decodes].sum())
            plain_ms = self._by_cost.times.plain_ms(batch.num_decodes)
            self._budget.pass_step(plain_ms, step.is_tried, self._newest_ms, num_tokens / batch.num_decodes)
        if step.depths is None:
            return
        asked = step.depths > 0
        num_drafted = num_accepted = np.zeros(batch.num_decodes, dtype=np.int64)
        if runs is not None:
            num_drafted = runs.num_drafted[: batch.num_decodes]
            num_accepted = np.clip(runs.counts[: batch.num_decodes] - 1, 0, num_drafted)
        self._was_in_vain |= bool((num_accepted[asked] == 0).any())
        rows = batch.rows[: batch.num_decodes]
        self._by_cost.rates.learn(rows[asked], num_drafted[asked], num_accepted[asked])

    def _with_padding(self, batch: ScheduledBatch) -> int:
        """The tokens that a step without prompts computes."""
        if not batch.has_drafts:
            return batch.num_tokens
        longest = int(batch.num_new.max()) - 1
        for depth, most_requests in self._captured.items():
            if depth >= longest and most_requests >= batch.num_decodes:
                return batch.num_decodes * (1 + depth)
        return batch.num_tokens

    def _find(self, step_id: int) -> _Planned | None:
        return next((step for step in self._planned if step.step_id == step_id), None)


def _rows_of(requests: Sequence[Request]) -> np.ndarray:
    return np.array([request.row for request in requests], dtype=np.int64)
