"""Bounds steps with prompts by time, so that running answers keep their pace beside a long prompt.

`runtime.max_step_ms` says how. Pace turns the bound into tokens by what step_cost.py has learnt of the steps before;
the scheduler divides them among prompts. Nothing is bounded while nothing decodes: nobody would gain by it.

Free of torch, and of clocks: the engine says how long a step took.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mllm_compile.runtime.config_sections import MaxStepMs
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.step_cost import StepCost, StepLoad, pairs_of

# A step may take so many times what its decodes take alone: a tenth of the pace of prompts is lost to these.
TENFOLD = 10.0
# Of a step's tokens, when it is cut to a captured size: else it is padded to the next larger one, as any step is.
_LEAST_KEPT = 0.75
# Tokens of the first chunk beside decodes, when nothing is known of what a chunk takes.
_FIRST_CHUNK = 512
# Steps of decodes alone are all alike: the mean of so many in a row is taken in. When one is seen to end depends on the
# host, and may be off by as long as it takes; what several take together is not.
_DECODE_STEPS = 8


@dataclass(slots=True)
class PromptBudget:
    """The part of a step that prompts may take; `take` subtracts.

    Attributes:
        tokens: tokens left.
        ms: time left; inf: no bound.
        token_ms, pair_ms: as StepCost has them.
    """

    tokens: int
    ms: float = math.inf
    token_ms: float = 0.0
    pair_ms: float = 0.0

    def longest(self, context: int) -> int:
        """The longest chunk behind `context` tokens that fits; 0: none."""
        if math.isinf(self.ms):
            return self.tokens
        if self.ms <= 0:
            return 0
        per_token = self.token_ms + self.pair_ms * context
        # per_token n + pair_ms n²/2 = ms, in the form that has no difference of near values, nor a division by 0.
        root = per_token + math.sqrt(per_token * per_token + 2 * self.pair_ms * self.ms)
        return self.tokens if root == 0 else min(self.tokens, int(2 * self.ms / root))

    def take(self, num_tokens: int, context: int) -> None:
        """Gives a chunk away."""
        self.tokens -= num_tokens
        self.ms -= self.token_ms * num_tokens + self.pair_ms * pairs_of(num_tokens, context)

    def half(self) -> PromptBudget:
        """A budget of half of it, rounded down."""
        return replace(self, tokens=self.tokens // 2, ms=self.ms / 2)


class Pace:
    """The bound of steps with prompts, and what steps were seen to take.

    Attributes:
        cost: what they were seen to take.
        last_bound_ms: the bound of the last step that had one.
    """

    def __init__(self, max_step_ms: MaxStepMs, step_sizes: Sequence[int] = ()) -> None:
        """
        Args:
            step_sizes: token counts of a step for which CUDA graphs are captured, ascending.
        """
        self.cost = StepCost()
        self.last_bound_ms: float | None = None
        self._max_step_ms = max_step_ms
        self._step_sizes = step_sizes
        self._decode_steps = 0  # of decodes alone that were not taken in; -1: the next one does not count
        self._decodes_ms = 0.0  # of all of them together

    def took(self, batch: ScheduledBatch, ms: float) -> None:
        """Learns from a step that took `ms` from the end of the one before, or from its own launch if that was over."""
        if self._max_step_ms == "none":
            return
        if batch.num_tokens > batch.num_decodes:
            self._decode_steps = -1  # the next one may have been held up by this one's launch
            self.cost.learn(load_of(batch), ms)
            return
        self._decode_steps += 1
        self._decodes_ms = self._decodes_ms + ms if self._decode_steps > 1 else ms
        if self._decode_steps == _DECODE_STEPS or (self._decode_steps > 0 and not self.cost.knows_decodes):
            self.cost.learn(load_of(batch), self._decodes_ms / self._decode_steps)
            self._decode_steps = 0

    def bound_ms(self, num_decodes: int, decode_keys: int) -> float | None:
        """The time that a step with these decodes may take; None: there is no bound."""
        if self._max_step_ms == "none" or not num_decodes:
            return None
        if self._max_step_ms != "tenfold":
            return self._max_step_ms
        if not self.cost.knows_decodes:
            return None
        return TENFOLD * self.cost.decodes_ms(num_decodes, decode_keys)

    def budget(self, num_decodes: int, decode_keys: int, max_tokens: int) -> PromptBudget:
        """The part of a step with these decodes that prompts may take, which has `max_tokens` left for them."""
        bound_ms = self.bound_ms(num_decodes, decode_keys)
        if bound_ms is None:
            return PromptBudget(max_tokens)
        cost, self.last_bound_ms = self.cost, bound_ms
        if not cost.knows_prompts:
            return PromptBudget(min(max_tokens, _FIRST_CHUNK))
        ms = bound_ms - cost.beside_ms(num_decodes, decode_keys)
        return PromptBudget(max_tokens, ms, cost.token_ms, cost.pair_ms)

    def rounded(self, num_tokens: int, least: int, most: int) -> int:
        """A step of about `num_tokens` tokens that fills a captured graph: the next smaller one, if not by more than a
        quarter, for tenfold the next larger; the same number where none is in [least, most]."""
        sizes = self._step_sizes
        if self._max_step_ms == "tenfold":
            index = bisect_left(sizes, num_tokens)
        else:
            index = bisect_right(sizes, num_tokens) - 1
            least = max(least, math.ceil(_LEAST_KEPT * num_tokens))
        # Beyond the largest there is none to fill.
        if not 0 <= index < len(sizes) or num_tokens > sizes[-1]:
            return num_tokens
        return sizes[index] if least <= sizes[index] <= most else num_tokens


def load_of(batch: ScheduledBatch) -> StepLoad:
    """The load of a batch."""
    count, num_new, prefix_lens = batch.num_decodes, batch.num_new, batch.prefix_lens
    keys = int(prefix_lens[:count].sum()) + count
    if batch.num_tokens == count:
        return StepLoad(count, keys)
    new = num_new[count:].astype(float)
    pairs = float((new * (prefix_lens[count:] + new / 2)).sum())
    return StepLoad(count, keys, batch.num_tokens - count, pairs)
