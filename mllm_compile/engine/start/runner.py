"""Starts an engine's runner: with the memory plan of an earlier start, its draft models and its other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mllm_compile.engine.start.memory_plan import MemoryPlan, situation
from mllm_compile.errors import DeviceMemoryError
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks.early_start import EarlyRanks
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.loaded import ModelSource
from mllm_compile.runtime.runner_config import MOST_VERIFIED, RunnerConfig
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.step.runner import StepRunner
from mllm_compile.store.measurements import device_key, read_measured, start_with
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.source import ArtifactSource, runner_config

if TYPE_CHECKING:
    from mllm_compile.ranks.group import RankGroup
    from mllm_compile.ranks.launch_local import Launcher
    from mllm_compile.ranks.nodes import Nodes
    from mllm_compile.ranks.steps import RankedStepRunner


def start_runner(
    settings: RunnerConfig, compiled: CompiledRuntime, timeline: Timeline, early: EarlyRanks
) -> tuple[ModelRunner, MemoryPlan, RankGroup | None]:
    """Makes a runner ready, with the KV pages of an earlier start where they still fit.

    Returns:
        The runner, the plan for the next start, and the group of the other ranks or None.
    """
    source = model_source(compiled, timeline)
    drafter = _draft_runner(compiled, source, timeline)
    with timeline.stage("memory plan"):
        now = situation(settings, early.free_bytes)
        measured = read_measured(compiled.artifact.measured_folder, device_key(settings.runtime.device))
        num_pages = (
            now.pages_from(start_with(measured, compiled.config).get("plan")) if settings.num_pages is None else None
        )
    if num_pages is not None:
        try:
            runner, group = _initialized(
                replace(settings, num_pages=num_pages), source, drafter, compiled, timeline, early
            )
            return runner, replace(now, num_pages=num_pages), group
        except (DeviceMemoryError, torch.OutOfMemoryError):
            timeline.note("the stored memory plan does not hold any more: measuring again")
    runner, group = _initialized(settings, source, drafter, compiled, timeline, early)
    return runner, replace(now, num_pages=runner.token_to_kv_pool.num_pages), group


def model_source(compiled: CompiledRuntime, timeline: Timeline, lender: ModelSource | None = None) -> ModelSource:
    """Where a runner's weights and program come from.

    Args:
        lender: the source of the model that it drafts for.
    """
    source = ArtifactSource(compiled, timeline, lender=lender if isinstance(lender, ArtifactSource) else None)
    if not compiled.config.runtime.skip_compiled:
        return source
    from mllm_compile.model.eager_model import EagerSource

    return EagerSource(source, compiled.config)


def _draft_runner(compiled: CompiledRuntime, source: ModelSource, timeline: Timeline) -> ModelRunner | None:
    """A runner of the draft model, where the runtime has one; its pages are as many as the model's. With it come those
    that draft on from it.

    Args:
        source: of the model.
    """
    drafter = compiled.drafter
    if drafter is None:
        return None
    settings = runner_config(drafter.config)
    # Steps of prompts alone are launched for the model. Drafts are short: padding costs less than captures.
    graphs = replace(settings.cudagraph, whole_prompts=False, few_sizes=True)
    settings = replace(settings, cudagraph=graphs)
    following = _draft_runner(drafter, source, timeline)
    if following is None and "hidden_states" in drafter.artifact.program.inputs:
        settings = replace(settings, most_chained=MOST_VERIFIED)
    return ModelRunner(settings, model_source(drafter, timeline, source), drafter=following)


def _initialized(
    settings: RunnerConfig,
    source: ModelSource,
    drafter: ModelRunner | None,
    compiled: CompiledRuntime,
    timeline: Timeline,
    early: EarlyRanks,
) -> tuple[ModelRunner, RankGroup | None]:
    """A runner that is ready, and the other ranks with it."""
    if settings.runtime.num_ranks == 1:
        runner = ModelRunner(settings, source, drafter=drafter)
        runner.initialize(timeline.stage)
        return runner, None
    from mllm_compile.ranks.group import RankGroup

    runtime = settings.runtime
    sizes = runtime.num_ranks, runtime.pipeline_parallel_size, runtime.device
    group = early.take_group(*sizes) or RankGroup(*sizes, *_launcher_and_nodes(compiled, early, timeline))
    started: list[ModelRunner] = []
    try:
        group.load(compiled, settings.num_pages)
        runner = ModelRunner(settings, source, group.communicator)
        started.append(runner)
        runner.initialize(timeline.stage)
        with timeline.stage("wait for ranks"):
            group.wait_ready()
        return runner, group
    except Exception as error:
        reason = group.explain(error)
        for one in started:
            one.shutdown()
        group.close()
        raise reason from None if reason is not error else error
    except BaseException:  # also Ctrl-C
        for one in started:
            one.shutdown()
        group.close()
        raise


def _launcher_and_nodes(
    compiled: CompiledRuntime, early: EarlyRanks, timeline: Timeline
) -> tuple[Launcher, Timeline, Nodes | None]:
    """The launcher of this host's ranks, the timeline, and the other hosts, where there are some.

    Raises:
        ConfigError: there is no secret, or Ray's nodes do not have what is asked for.
        DeviceError: the port is taken, or Ray has no room.
    """
    runtime = compiled.config.runtime
    if runtime.distributed_executor_backend == "ray":
        from mllm_compile.ranks.by_ray.launch import RayLauncher

        by_ray = RayLauncher(compiled, timeline)
        return by_ray, timeline, by_ray.nodes
    from mllm_compile.ranks.launch_local import LocalLauncher

    launcher = LocalLauncher(early.take)
    if runtime.nnodes == 1:
        return launcher, timeline, None
    from mllm_compile.config.resolution.device import detect_device
    from mllm_compile.ranks.admission import node_secret
    from mllm_compile.ranks.node import hello_of
    from mllm_compile.ranks.nodes import Nodes

    each = runtime.num_ranks // runtime.nnodes
    own = hello_of(compiled.artifact, 0, 0, runtime.nnodes, detect_device(runtime.device).name)
    node_of = {rank: rank // each for rank in range(each, runtime.num_ranks)}
    return launcher, timeline, Nodes(runtime.master_addr, runtime.master_port, node_of, node_secret(), own)


def make_step_runner(runner: ModelRunner, group: RankGroup | None) -> StepRunner | RankedStepRunner:
    """Runs the steps of a runner, and has the other ranks run theirs."""
    sampler = Sampler(runner.model.sampling)
    if group is None:
        return StepRunner(runner, sampler)
    from mllm_compile.ranks.steps import RankedStepRunner, StagedStepRunner

    computes_at_once = runner.device.type == "cpu" and group.num_stages > 1
    kind = StagedStepRunner if computes_at_once else RankedStepRunner
    return kind(StepRunner(runner, sampler, group.announce), group)


def shut_down(runner: ModelRunner, group: RankGroup | None) -> None:
    """Gives the device's memory back, and ends the other ranks."""
    runner.shutdown()  # first: graphs hold calls of the group
    if group is not None:
        group.close()


def device_check(device: torch.device, group: RankGroup | None) -> Callable[[], None]:
    """Raises when the device does not compute any more, as after an illegal memory access; or not with the others."""

    def check() -> None:
        if group is not None:
            group.check_after_failure()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # after a step that ran out of memory
            torch.ones(1, device=device).item()

    return check
