"""An engine without a model: the real scheduler and prefix cache, and steps that take what was measured."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, cast

import numpy as np

from benchmarks.fleet.conversation import Conversation
from benchmarks.fleet.engine import MAX_RUNNING, MAX_STEP, PAGE, Told
from benchmarks.fleet.step_costs import StepCosts
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.pace import TENFOLD, load_of
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.scheduler import Scheduler


class SteppedEngine:
    """An Engine; see there.

    Args:
        kv_tokens: of its pages.
        max_model_len: longest prompt and answer together.
        fold: tokens that each of these stands for; they are divided by it here. A step of decodes stands for as many.
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
        self._unseen: dict[Request, float] = {}  # without a first token: when they begin to wait
        self.busy_s = 0.0
        self.next_s = math.inf

    def add(self, now_s: float, call: Any, messages: Conversation) -> None:
        """See Engine."""
        prompt, answer = messages.prompt, messages.answer
        # The scheduler asks a prompt's list for its length alone where the ids are given as an array.
        ids = cast("list[int]", range(prompt.size))
        params = _params_of(answer.size)
        request = Request(request_id="", prompt_token_ids=ids, prompt_ids=prompt, params=params)
        self._scheduler.add(request)
        self._answers[request] = (call, int(answer[0]))
        self._unseen[request] = now_s
        if self._batch is None:
            self._begin_step(now_s)
        elif not self._prompts_ms:  # it waits for one step, and this is `fold` steps of decodes
            self._unseen[request] += max(0.0, self.next_s - now_s - self._decodes_ms / 1e3)

    def go_on(self, now_s: float) -> Told:
        """See Engine."""
        batch = self._batch
        assert batch is not None, "a step has begun"
        sampled = self._next_ids[batch.rows]
        self._next_ids[batch.rows] += batch.sample_mask
        self._scheduler.step_took(batch, self._step_ms / 1e3)
        result = self._scheduler.update(batch, sampled)
        first = []
        # A prompt of a step by itself shares it with a decode, or with as many as make a tenth of the step.
        beside_ms = max(self._decodes_ms, self._prompts_ms / (TENFOLD - 1))
        came_s = now_s - max(0.0, self._fold * self._decodes_ms - beside_ms) / 1e3
        for index in result.accepted[::-1]:  # prompts are behind decodes
            if index < batch.num_decodes:
                break
            request = batch.requests[index]
            if request in self._unseen:
                first.append((self._answers[request][0], came_s - self._unseen.pop(request)))
        ended = [(self._answers.pop(one)[0], one.num_cached_tokens) for one in result.finished]
        self._begin_step(now_s)
        return Told(first, ended)

    def _begin_step(self, now_s: float) -> None:
        self._batch = batch = self._scheduler.schedule()
        self.next_s = math.inf
        if batch is None:
            return
        for request in batch.admitted:
            self._next_ids[request.row] = self._answers[request][1] + len(request.output_token_ids)
        load = load_of(batch)
        self._decodes_ms, self._prompts_ms = (
            self._costs.decodes_ms(load, self._fold),
            self._costs.prompts_ms(load, self._fold),
        )
        self._step_ms = self._fold * self._decodes_ms + self._prompts_ms
        self.busy_s += self._step_ms / 1e3
        self.next_s = now_s + self._step_ms / 1e3


@cache
def _params_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
