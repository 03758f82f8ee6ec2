"""One engine step: ScheduledBatch → tokens, with the host never waiting for the device.

StepRunner keeps the order of a step: pages, plan, announcement, launch, states. paths/choose.py says which path
launches it. Steps run on one stream in the order of their submission. So a step may be submitted before the tokens of
the last one are known. With a grammar the model is launched so as well. The choice of tokens is submitted when the
tokens before are known, while the model runs (grammar_rows.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ranks.records import SamplingMode, StepRecord
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.common_prefix import CommonPrefix
from mllm_compile.runtime.step.data_parallel_plan import DataParallelPlanner, DataParallelStep
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.media_steps import MediaSteps
from mllm_compile.runtime.step.model_drafters import model_drafter
from mllm_compile.runtime.step.paths.base import Step, StepParts, StepPath
from mllm_compile.runtime.step.paths.choose import StepPaths
from mllm_compile.runtime.step.plan import FixedRowsPlanner, Planner, RowsPlanner
from mllm_compile.runtime.step.pools import StepPools
from mllm_compile.runtime.step.results import StepHandle
from mllm_compile.runtime.step.sampling import StepSampling
from mllm_compile.runtime.step.seen_images import ImageSteps
from mllm_compile.runtime.step.source_steps import SourceSteps

Announce = Callable[[StepRecord], None]
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that is planned and announced, and the path that launches it."""

    step: Step
    path: StepPath


class StepRunner:
    """Runs ScheduledBatches on a ModelRunner. Used by one thread.

    Attributes:
        sampling: chooses the tokens of steps.
        media: the images of steps.
        sources: the sources of steps, of an encoder-decoder.
        drafter: drafts by the runner's draft model; None: it has none.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, announce: Announce | None = None) -> None:
        """
        Args:
            announce: told of each step before it is launched, for ranks that follow; None without such ranks.
        """
        self._runner = runner
        self._announce = announce
        self.sampling = StepSampling(runner, sampler)
        runtime, num_rows = runner.config.runtime, runner.row_state.last_tokens.shape[0]
        table = runner.req_to_token_pool
        pages = HostPageTable(table.req_to_token.shape[0], table.max_context_len, runtime.page_size)
        self.sources = SourceSteps(runner, pages, num_rows)
        self.images = ImageSteps(runner, pages, num_rows)
        self.media = MediaSteps(runner, num_rows)
        head = runner.drafter
        self.drafter = None if head is None else model_drafter(head, pages, runner.draft_chain)
        dp_step = None
        if runner.dp_size > 1 and runner.communicator is not None:
            most = runtime.max_running_requests
            dp_step = DataParallelStep(runner.communicator.rank, runner.dp_size, most, self.sampling.scored_at_once)
        self._pages = pages
        self._planner = _planner(runner, pages, dp_step)
        self._pools = StepPools(runner, pages, dp_step)
        prefix = CommonPrefix(runner, pages)
        parts = StepParts(
            runner, self._planner, self._pools, self.media, self.sources, self.images, self.sampling, prefix
        )
        self._paths = StepPaths(parts, runner.graph_runner)
        self._of_thread = threading.local()

    def prepare_thread(self) -> None:
        """Makes the calling thread one that submits, as long as it lives: without gradients, on the runner's GPU, with
        its rank's communicator. Where another submits, each of its steps begins with that."""
        held = self._of_thread.held = ExitStack()
        held.enter_context(torch.inference_mode())
        held.enter_context(self._runner.on_device())

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch a step without waiting for it, nor for the one before.

        Raises:
            DeviceMemoryError: the step's activations do not fit, or what sampling needs; no request gets a token of it.
        """
        return self.launch(self.prepare(batch))

    def prepare(self, batch: ScheduledBatch) -> PreparedStep:
        """Plan a step, and announce it to the ranks that follow; raises as `submit`."""
        return self._ready(self._prepare, batch, batch)

    def launch(self, prepared: PreparedStep) -> StepHandle:
        """Launch the step that was prepared behind the one that was launched last; raises as `submit`."""
        return self._ready(self._launch, prepared, prepared.step.batch)

    def _ready(self, call: Callable[[T], U], argument: T, batch: ScheduledBatch) -> U:
        try:
            if hasattr(self._of_thread, "held"):
                return call(argument)
            with torch.inference_mode(), self._runner.on_device():
                return call(argument)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"a step of {batch.num_tokens} tokens of {batch.num_requests} requests ran out of memory: {error} "
                "Lower runtime.mem_fraction_static or runtime.max_num_batched_tokens, or ask for fewer prompt_logprobs "
                "at once."
            ) from error

    def experts_of(self, row: int, num_tokens: int) -> np.ndarray:
        """The experts that a row's first tokens chose, [num_tokens, layers, k] int16; ahead of the next step that is
        launched, which may give the row to another request. Waits for the device.

        Raises:
            RuntimeError: runtime.routed_experts is not set.
        """
        routes = self._runner.expert_routes
        if routes is None:
            raise RuntimeError("internal error: experts are asked for, and runtime.routed_experts is not set")
        return routes.read(self._pages.slots(np.full(num_tokens, row), np.arange(num_tokens)))

    def _prepare(self, batch: ScheduledBatch) -> PreparedStep:
        if self.drafter is not None:
            self.drafter.settle()
        if self._runner.draft_chain is not None:
            self._pools.forget_rows(batch)
        self._pools.enter_pages(batch)
        self.sources.encode(batch)
        self.images.encode(batch)
        self.media.admit(batch.admitted)
        path = self._paths.of(batch)
        plan = path.plan(batch)
        media = self.media.plan(batch, self._planner.token_positions(batch, plan))
        choice = SamplingMode.SAMPLED
        if self._announce is not None:
            choice = self.sampling.choice(batch, plan)
            scored = plan.fields.scored_indices if plan.scored is None else plan.scored
            self._announce(StepRecord(batch, scored, media, choice))
        if media is not None:
            plan = self._planner.with_media(plan, batch, media)
        if self.drafter is not None and self._runner.draft_chain is not None and batch.has_drafts:
            self.drafter.catch_up(batch)
        return PreparedStep(Step(batch, plan, choice), path)

    def _launch(self, prepared: PreparedStep) -> StepHandle:
        step = prepared.step
        batch, plan = step.batch, step.plan
        results = prepared.path.run(step) or self._paths.forward.run(step)
        assert results is not None, "the forward path takes any step"
        self._pools.save_states(batch.state_saves)
        if self.drafter is not None:
            self.drafter.follow(batch, step.hidden_states)
        handle = StepHandle(batch, plan, results)
        self.sampling.launched(handle)
        return handle


def _planner(runner: ModelRunner, pages: HostPageTable, dp_step: DataParallelStep | None) -> Planner:
    """The planner of all steps: the deterministic mode and ranks with requests of their own have one each."""
    runtime = runner.config.runtime
    if runtime.any_rows:
        return RowsPlanner(pages)
    if runtime.deterministic:
        return FixedRowsPlanner(pages, runtime.max_num_batched_tokens)
    if dp_step is not None:
        return DataParallelPlanner(pages, dp_step, None if runner.graph_runner is None else runner.graph_runner.decodes)
    return Planner(pages)
