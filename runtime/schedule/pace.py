"""Bounds steps with prompts by time, so that running answers keep their pace beside a long prompt.

`runtime.max_step_ms` says how. Pace turns the bound into tokens by what step_cost.py has learnt of the steps before;
the scheduler divides them among prompts. Nothing is bounded while nothing decodes: nobody would gain by it.

Free of torch, and of clocks: the engine says how long a step took.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mllm_compile.runtime.config_sections import MaxStepMs
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.step_cost import StepCost, StepLoad, pairs_of

# A step may take so many times what its decodes take alone: a tenth of the pace of prompts is lost to these.
TENFOLD = 10.0
# Of a chunk, when it is cut to fill a captured graph or whole blocks of attention.
_LEAST_KEPT = 0.75
# Tokens of a block, of linears and of attention: 130 take about as long as 256.
_BLOCK = 128
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
        fixed_ms: time of the step that does not depend on prompts.
    """

    tokens: int
    ms: float = math.inf
    token_ms: float = 0.0
    pair_ms: float = 0.0
    fixed_ms: float = 0.0

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

    def __init__(
        self,
        max_step_ms: MaxStepMs,
        step_sizes: Sequence[int] = (),
        query_blocks: float = 0.0,
        divide_prefix: bool = False,
    ) -> None:
        """
        Args:
            step_sizes, query_blocks, divide_prefix: as SchedulerConfig has them.
        """
        self.cost = StepCost()
        self.last_bound_ms: float | None = None
        self._max_step_ms = max_step_ms
        self._step_sizes = step_sizes
        self._query_blocks = query_blocks
        self._divide_prefix = divide_prefix
        self._decode_steps = 0  # of decodes alone that were not taken in; -1: the next one does not count
        self._decodes_ms = 0.0  # of all of them together

    def took(self, batch: ScheduledBatch, ms: float) -> None:
        """Learns from a step that took `ms` from the end of the one before, or from its own launch if that was over."""
        if self._max_step_ms == "none":
            return
        if batch.num_prompt_tokens:
            self._decode_steps = -1  # the next one may have been held up by this one's launch
            self.cost.learn(load_of(batch), ms)
            return
        if batch.has_drafts:  # of another size than the steps around it
            if self._decode_steps >= 0:
                self.cost.learn(load_of(batch), ms)
            self._decode_steps = 0
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
        return PromptBudget(max_tokens, ms, cost.token_ms, cost.pair_ms, fixed_ms=bound_ms - ms)

    def cut(self, chunk: int, others: int, context: int, bounds: tuple[int, int], budget: PromptBudget) -> int:
        """The length of a chunk behind `context` tokens, beside `others`, that there is time for up to `chunk`.

        With tenfold the step fills the next larger captured graph, if there is one. Else it is the fastest length for
        the prompt among lengths that are not much shorter.

        Args:
            bounds: the least and the most tokens of it.
        """
        least, most = bounds
        is_captured = self._step_sizes and others + chunk <= self._step_sizes[-1]
        if self._max_step_ms != "tenfold" or not is_captured:
            return self._fastest(chunk, others, context, least, budget)
        padded = self._padded(others + chunk) - others
        return padded if least <= padded <= most else chunk

    def _fastest(self, chunk: int, others: int, context: int, least: int, budget: PromptBudget) -> int:
        """Linears take as long as of all blocks of the captured size that the step is padded to, attention as of all
        its own blocks."""
        sizes = [size - others for size in self._step_sizes]
        whole_blocks = range(_BLOCK, chunk + 1, _BLOCK)
        least = max(least, math.ceil(_LEAST_KEPT * chunk))

        def ms_a_token(length: int) -> float:
            rows = -(-self._padded(others + length) // _BLOCK) * _BLOCK
            ms = budget.fixed_ms + budget.token_ms * (rows - others)
            return (ms + budget.pair_ms * pairs_of(self._attended(length), context)) / length

        size: int = min((one for one in (chunk, *sizes, *whole_blocks) if least <= one <= chunk), key=ms_a_token)
        return size

    def _attended(self, length: int) -> float:
        """The queries of as many full blocks as take attention as long as a chunk of `length`: all its waves' queries.
        Where a long prefix is divided, few blocks make several times as many."""
        blocks, beside = -(-length // _BLOCK), self._query_blocks
        if not beside:
            return blocks * _BLOCK
        parts = (1, 2, 4) if self._divide_prefix and blocks < 1.5 * beside else (1,)
        return min(math.ceil(blocks * count / beside) / count for count in parts) * beside * _BLOCK

    def _padded(self, num_tokens: int) -> int:
        """Tokens of the captured step that holds so many; the same number where none does."""
        index = bisect_left(self._step_sizes, num_tokens)
        return self._step_sizes[index] if index < len(self._step_sizes) else num_tokens


def load_of(batch: ScheduledBatch) -> StepLoad:
    """The load of a batch; each drafted token is a decode's row, too."""
    count, num_new, prefix_lens = batch.num_decodes, batch.num_new, batch.prefix_lens
    rows, keys = count, int(prefix_lens[:count].sum()) + count
    if batch.has_drafts:
        drafted = num_new[:count].astype(np.int64)
        rows, keys = int(drafted.sum()), int((drafted * prefix_lens[:count] + drafted * (drafted + 1) // 2).sum())
    if not batch.num_prompt_tokens:
        return StepLoad(rows, keys)
    new = num_new[count:].astype(float)
    pairs = float((new * (prefix_lens[count:] + new / 2)).sum())
    return StepLoad(rows, keys, batch.num_prompt_tokens, pairs)
