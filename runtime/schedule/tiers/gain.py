"""Decides whether loading a prefix takes less time than computing it, by what both were seen to take. Free of torch."""

from __future__ import annotations

from mllm_compile.runtime.schedule.pace import load_of
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.step_cost import StepCost, pairs_of

_KEPT = 0.9  # of an earlier copy's weight after each further one
_DOUBTED = 0.98  # of copies' time after each load that does not pay: else none would, once one was slow


class Gain:
    """Args: min_gain: least quotient of computing's time and loading's; 0: everything is loaded."""

    def __init__(self, min_gain: float) -> None:
        self._min_gain = min_gain
        self._cost = StepCost()
        self._copied = {False: (0.0, 0.0), True: (0.0, 0.0)}  # bytes and seconds, the last copies most; True: below

    def computed(self, batch: ScheduledBatch, ms: float) -> None:
        """Takes in a step with prompts."""
        self._cost.learn(load_of(batch), ms)

    def loaded(self, num_bytes: int, seconds: float, from_below: bool) -> None:
        """Takes in a copy, from the tier or from the one below."""
        before, before_s = self._copied[from_below]
        self._copied[from_below] = _KEPT * before + num_bytes, _KEPT * before_s + seconds

    def pays(self, start: int, end: int, num_bytes: int, from_below: int) -> bool:
        """True if the tokens from `start` to `end` of a prompt come sooner by `num_bytes` from the tier and
        `from_below` bytes from the one below. What was never seen is taken to be fast: then it will be known."""
        if not self._min_gain or not self._cost.knows_prompts:
            return True
        count = end - start
        computing = self._cost.token_ms * count + self._cost.pair_ms * pairs_of(count, start)
        each = ((num_bytes, self._copied[False]), (from_below, self._copied[True]))
        loading = sum(1e3 * count * seconds / max(copied, 1.0) for count, (copied, seconds) in each)
        if computing >= self._min_gain * loading:
            return True
        self._copied = {below: (copied, _DOUBTED * seconds) for below, (copied, seconds) in self._copied.items()}
        return False
