"""Runs decode steps of our own engine one after another, without overlap: in a worker process, to look at each.

The steps are the engine's own (scheduler, batch, upload, model, sampler), on requests of one length that never end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import random_prompts
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.ranks.steps import RankedStepRunner
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.request import Request


def model_runner(parts: EngineParts) -> Any:
    """The ModelRunner of this process, rank 0's where there are several: the engine knows its step runner by less."""
    steps: Any = parts.step_runner
    return (steps._runner if isinstance(steps, RankedStepRunner) else steps)._runner


def endless_requests(setting: Setting, batch: int, prompt_len: int) -> list[Request]:
    """Greedy requests of the prompts that the latency work has too."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    return [
        Request(request_id=str(index), prompt_token_ids=prompt, params=params)
        for index, prompt in enumerate(random_prompts(batch, prompt_len, setting.vocab_size, seed=batch))
    ]


def prefilled(parts: EngineParts, requests: Sequence[Request]) -> Callable[[], None]:
    """Computes the prompts; returns the function that runs the next step."""
    for request in requests:
        parts.scheduler.add(request)

    def step() -> None:
        planned = parts.scheduler.schedule()
        if planned is None:
            raise BenchmarkError("the requests ended before the steps did; lower --context or --steps")
        output = parts.step_runner.submit(planned).wait()
        parts.scheduler.update(planned, output.token_ids)

    while not all(request.output_token_ids for request in requests):
        step()
    return step
