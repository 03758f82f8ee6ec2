"""Chooses how many tokens are drafted for each request of a step, by what they cost and how likely they are accepted.

A step gets the drafted tokens with which most tokens a second are expected. Those that are likeliest accepted come
first; each is worth while as long as the step gains more by it than it gets longer. Where no number of them is worth
it, as with many requests, steps are without drafts and planned ahead. Where steps are captured, all requests of one get
as many: it takes as long for those with fewer. Free of torch.

Shape legend: N requests that may have a draft, K most tokens of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from mllm_compile.runtime.speculation.acceptance_rates import AcceptanceRates
from mllm_compile.runtime.speculation.step_times import StepTimes

_LEAST_GAIN = 1.01  # times the tokens a second without drafts: times of steps are not known better


class DepthByCost:
    """See the module's header.

    Args:
        num_rows: rows of requests, the dummy among them.
        most: K.
        most_in_step: most drafted tokens of all requests together.
        hope: as AcceptanceRates takes it.

    Attributes:
        times, times_on_device, rates: what was seen so far; on_device: of steps whose drafts the device makes.
    """

    def __init__(self, num_rows: int, most: int, most_in_step: int, hope: float) -> None:
        self.times, self.times_on_device = StepTimes(waits=True), StepTimes(waits=False)
        self.rates = AcceptanceRates(num_rows, most, hope)
        self._most_in_step = most_in_step

    def choose(self, rows: np.ndarray, num_decodes: int, most: int) -> np.ndarray | None:
        """Most tokens of the draft of each request in the next step: [N] int; None: it is to be without drafts.

        Args:
            rows: [N] int, of the requests.
            num_decodes: requests of the step, those without drafts among them.
            most: tokens of a draft, up to K.
        """
        times = self.times.of(num_decodes)
        if times.plain_ms is None or not rows.size:
            return None
        likely, made = self.rates.expected(rows)
        likely, limit = likely[:, :most], min(times.most_drafted, self._most_in_step)
        chosen = np.argsort(-likely, axis=None, kind="stable")[:limit]
        of_rows = chosen // most
        made = made[of_rows]
        gained = num_decodes + np.cumsum(made * likely.ravel()[chosen])
        pace = gained / times.verify_ms(np.cumsum(made))
        best = int(pace.argmax())
        if pace[best] * times.plain_ms < _LEAST_GAIN * num_decodes:
            return None
        return np.bincount(of_rows[: best + 1], minlength=rows.size)

    def choose_alike(self, rows: np.ndarray, num_decodes: int, depths: Sequence[int], *, on_device: bool) -> int:
        """The tokens of the draft of each request in the next steps, one of `depths`; 0: they are to be without drafts.

        Args:
            rows, num_decodes: as `choose` takes them.
            depths: ascending; a draft of one takes as long as one of all its tokens.
            on_device: the device drafts.
        """
        times = (self.times_on_device if on_device else self.times).of(num_decodes)
        num_known = sum(1 for _ in takewhile(lambda depth: times.knows(num_decodes * depth), depths))
        tried = np.array(depths[: num_known + 1], dtype=np.int64)  # one at a time: nothing unknown costs much
        if times.plain_ms is None or not rows.size or not tried.size:
            return 0
        likely, made = self.rates.expected(rows)
        gained = num_decodes + (made[:, None] * likely.cumsum(axis=1)).sum(axis=0)[tried - 1]
        pace = gained / times.verify_ms(num_decodes * tried)
        best = int(pace.argmax())
        return int(tried[best]) if pace[best] * times.plain_ms >= _LEAST_GAIN * num_decodes else 0
