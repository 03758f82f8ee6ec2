"""An engine without a model: the real scheduler and prefix cache, and steps that take what was measured."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np

from benchmarks.fleet.step_costs import StepCosts
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.pace import TENFOLD, load_of
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.scheduler import Scheduler

PAGE = 64
MAX_RUNNING, MAX_STEP = 256, 8192  # as the server's defaults


class SimulatedEngine:
    """One engine, whose clock the caller has.

    Args:
        kv_tokens: of its pages.
        max_model_len: longest prompt and answer together.
        fold: tokens that each of these stands for; they are divided by it here.
    """

    def __init__(self, costs: StepCosts, kv_tokens: int, max_model_len: int, fold: int) -> None:
        self._costs, self._fold = costs, fold
        config = SchedulerConfig(
            max_running_requests=MAX_RUNNING,
            max_num_batched_tokens=max(MAX_STEP // fold, MAX_RUNNING),
            max_model_len=max_model_len // fold,
            page_size=PAGE // fold,
            num_pages=kv_tokens // PAGE + 1,
            max_step_ms="tenfold",
        )
        self._scheduler = Scheduler(config)
        self._next_ids = np.zeros(MAX_RUNNING + 1, np.int64)  # by row
        self._batch: ScheduledBatch | None = None
        self._step_ms = self._decodes_ms = self._prompts_ms = 0.0
        self._answers: dict[Request, tuple[Any, int]] = {}  # the call, and its answer's first id
        self._unseen: set[Request] = set()  # without a first token
        self.busy_ms = 0.0

    def add(self, call: Any, prompt: np.ndarray, answer: np.ndarray) -> None:
        """A call of a prompt's ids, which will be answered by these."""
        size = prompt.size
        params = _params_of(answer.size)
        # The scheduler asks a prompt's list for its length alone where the ids are given as an array.
        ids = cast("list[int]", range(size))
        request = Request(request_id="", prompt_token_ids=ids, prompt_ids=prompt, params=params)
        self._scheduler.add(request)
        self._answers[request] = (call, int(answer[0]))
        self._unseen.add(request)

    def begin_step(self) -> float | None:
        """Milliseconds of the next step, which has begun; None: there is nothing to do."""
        self._batch = batch = self._scheduler.schedule()
        if batch is None:
            return None
        for request in batch.admitted:
            self._next_ids[request.row] = self._answers[request][1] + len(request.output_token_ids)
        load = load_of(batch)
        self._decodes_ms, self._prompts_ms = (
            self._costs.decodes_ms(load, self._fold),
            self._costs.prompts_ms(load, self._fold),
        )
        self._step_ms = self._fold * self._decodes_ms + self._prompts_ms
        self.busy_ms += self._step_ms
        return self._step_ms

    def not_waited_ms(self, left_ms: float) -> float:
        """Milliseconds, of those left of a step, that a new call would not wait: this is `fold` steps of decodes."""
        return 0.0 if self._prompts_ms else max(0.0, left_ms - self._decodes_ms)

    def end_step(self) -> tuple[list[tuple[Any, float]], list[tuple[Any, int]]]:
        """Calls that got their first token, each with the milliseconds that it came before the end; and those that
        ended, each with tokens of its prompt that were cached."""
        batch, self._batch = self._batch, None
        assert batch is not None, "a step has begun"
        sampled = self._next_ids[batch.rows]
        self._next_ids[batch.rows] += batch.sample_mask
        self._scheduler.step_took(batch, self._step_ms / 1e3)
        result = self._scheduler.update(batch, sampled)
        first = []
        # A prompt of a step by itself shares it with a decode, or with as many as make a tenth of the step.
        beside_ms = max(self._decodes_ms, self._prompts_ms / (TENFOLD - 1))
        early_ms = max(0.0, self._fold * self._decodes_ms - beside_ms)
        for index in result.accepted[::-1]:  # prompts are behind decodes
            if index < batch.num_decodes:
                break
            request = batch.requests[index]
            if request in self._unseen:
                self._unseen.remove(request)
                first.append((self._answers[request][0], early_ms))
        ended = [(self._answers.pop(one)[0], one.num_cached_tokens) for one in result.finished]
        return first, ended


@cache
def _params_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
