"""Decides whether loading a prefix takes less time than computing it, by what both were seen to take. Free of torch."""

from __future__ import annotations

from mllm_compile.runtime.schedule.pace import load_of
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.step_cost import StepCost, pairs_of

_KEPT = 0.9  # of an earlier copy's weight after each further one


class Gain:
    """
    Args:
        min_gain: least quotient of computing's time and loading's; 0: everything is loaded.
        page_bytes: a copy of fewer bytes says nothing of the link's rate.
    """

    def __init__(self, min_gain: float, page_bytes: int) -> None:
        self._min_gain, self._page_bytes = min_gain, page_bytes
        self._cost = StepCost()
        self._bytes = self._seconds = 0.0  # of copies, the last ones most

    def computed(self, batch: ScheduledBatch, ms: float) -> None:
        """Takes in a step."""
        if batch.num_prompt_tokens:
            self._cost.learn(load_of(batch), ms)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Takes in a copy."""
        self._bytes = _KEPT * self._bytes + num_bytes
        self._seconds = _KEPT * self._seconds + seconds

    def pays(self, start: int, end: int, num_bytes: int) -> bool:
        """True if the tokens from `start` to `end` of a prompt come sooner by `num_bytes` from the tier. What was never
        seen is taken to be fast: then it will be known."""
        if not self._min_gain or not self._seconds or not self._cost.knows_prompts:
            return True
        count = end - start
        computing = self._cost.token_ms * count + self._cost.pair_ms * pairs_of(count, start)
        loading = 1e3 * num_bytes * self._seconds / max(self._bytes, 1.0)
        return computing >= self._min_gain * loading
