"""Chooses how many tokens are drafted for each request of a step, by what they cost and how likely they are accepted.

A step gets the drafted tokens with which most tokens a second are expected. Those that are likeliest accepted come
first; each is worth while as long as the step gains more by it than it gets longer. Where no number of them is worth
it, as with many requests, steps are without drafts and planned ahead. Free of torch.

Shape legend: N requests that may have a draft, K most tokens of a draft.
"""

from __future__ import annotations

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

    Attributes:
        times, rates: what was seen so far.
    """

    def __init__(self, num_rows: int, most: int, most_in_step: int) -> None:
        self.times = StepTimes()
        self.rates = AcceptanceRates(num_rows, most)
        self._most, self._most_in_step = most, most_in_step

    def choose(self, rows: np.ndarray, num_decodes: int) -> np.ndarray | None:
        """Most tokens of the draft of each request in the next step: [N] int; None: it is to be without drafts.

        Args:
            rows: [N] int, of the requests.
            num_decodes: requests of the step, those without drafts among them.
        """
        times = self.times.of(num_decodes)
        if times.plain_ms is None or not rows.size:
            return None
        likely, made = self.rates.expected(rows)
        limit = min(times.most_drafted, self._most_in_step)
        chosen = np.argsort(-likely, axis=None, kind="stable")[:limit]
        of_rows = chosen // self._most
        made = made[of_rows]
        gained = num_decodes + np.cumsum(made * likely.ravel()[chosen])
        pace = gained / times.verify_ms(np.cumsum(made))
        best = int(pace.argmax())
        if pace[best] * times.plain_ms < _LEAST_GAIN * num_decodes:
            return None
        return np.bincount(of_rows[: best + 1], minlength=rows.size)
