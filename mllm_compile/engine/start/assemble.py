"""Makes the parts of an engine from a config: the cached runtime loaded, pools allocated, graphs captured.

Everything that is slow to import or needs the device is here and below; Engine imports it when it is made. A warm
start runs this too, so it may not import Transformers, Dynamo or Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.sources import EngineSource, config_or_runtime, runtime_settings
from mllm_compile.engine.pooling.assemble import pooling_parts
from mllm_compile.engine.pooling.parts import PoolingParts
from mllm_compile.engine.start.adapters import adapter_parts
from mllm_compile.engine.start.cpu_threads import prepare_threads
from mllm_compile.engine.start.memory_plan import MemoryPlan
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.engine.start.prompts import (
    decoder_prompts,
    ends_of_answers,
    grammars,
    load_text_parts,
    media_preprocessor,
    text_files,
    tower_of,
)
from mllm_compile.engine.start.runner import device_check, make_step_runner, shut_down, start_runner
from mllm_compile.errors import ConfigError, DamagedWeightsError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.media.files import PROCESSOR_FILES
from mllm_compile.process.progress import Reporter
from mllm_compile.process.timeline import Timeline, timeline_of
from mllm_compile.ranks.early_start import EarlyRanks, early_ranks
from mllm_compile.runtime.device.sleep import SleepingMemory
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.runtime.state.factory import draft_obstacle
from mllm_compile.runtime.step.runner import StepRunner
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.store.contents import remove_stored
from mllm_compile.store.measurements import device_key, read_measured, with_start, write_measured
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.shared_weights import num_weight_bytes
from mllm_compile.store.source import runner_config

if TYPE_CHECKING:
    from mllm_compile.ranks.group import RankGroup
    from mllm_compile.ranks.steps import RankedStepRunner

_LOG_FORWARD_TIMES_S = 10.0


def assemble(
    config: EngineSource,
    reporter: Reporter,
    *,
    forward_times: bool = False,
    num_pages: int | None = None,
    early: EarlyRanks | None = None,
) -> EngineParts:
    """Like assemble_any, of a model that generates.

    Raises:
        ConfigError: it pools.
    """
    parts = assemble_any(config, reporter, forward_times=forward_times, num_pages=num_pages, early=early)
    if isinstance(parts, PoolingParts):
        parts.shutdown()
        raise ConfigError("the model pools, and generates no text. Use Engine.embed and the like (docs/encoders.md).")
    return parts


def assemble_any(
    config: EngineSource,
    reporter: Reporter,
    *,
    forward_times: bool = False,
    num_pages: int | None = None,
    early: EarlyRanks | None = None,
) -> EngineParts | PoolingParts:
    """Loads a runtime's folder as it is; for a config the cached runtime that fits, or one that is compiled first.

    Args:
        forward_times: measure every forward.
        num_pages: pages of the KV cache, the dummy page included; None: as many as fit.
        early: followers' processes that were started for it; None: some are, where it needs them.

    Raises:
        MllmError: of the kind that says what is wrong with the config, the model, or the device.
    """
    source = config_or_runtime(config)
    settings = runtime_settings(source)
    if settings is not None and settings.node_rank:
        raise ConfigError(
            f"runtime.node_rank is {settings.node_rank}: node 0 has the engine. Run mllm-compile serve on this one."
        )
    if settings is not None and settings.nnodes > 1:
        from mllm_compile.ranks.admission import node_secret

        node_secret()  # told ahead of a compile
    elif settings is not None and settings.distributed_executor_backend == "ray":
        from mllm_compile.ranks.by_ray.installed import check_installed

        check_installed()  # likewise
    if settings is not None and settings.kv_transfer_config.kv_connector:
        from mllm_compile.kv_connectors import installed

        installed.check_installed(settings.kv_transfer_config)
    if early is None:
        with early_ranks(source) as early:
            return assemble_any(source, reporter, forward_times=forward_times, num_pages=num_pages, early=early)
    timeline = timeline_of(reporter)
    early.meet(timeline)
    load = partial(_load, timeline=timeline, forward_times=forward_times, num_pages=num_pages, early=early)
    if isinstance(source, Path):
        return load(open_runtime(source, timeline))
    compiled = load_or_compile(source, timeline)
    try:
        return load(compiled)
    except DamagedWeightsError as error:  # seen only when they are on the device
        timeline.note(f"the cached runtime is not used: {error}")
        remove_stored(compiled.folder)
    return load(load_or_compile(source, timeline))


def _load(
    compiled: CompiledRuntime, timeline: Timeline, forward_times: bool, num_pages: int | None, early: EarlyRanks
) -> EngineParts | PoolingParts:
    if compiled.config.model.pools:
        return pooling_parts(compiled, text_files(compiled), timeline)
    settings = replace(
        runner_config(compiled.config),
        num_pages=num_pages,
        forward_times_interval_s=_LOG_FORWARD_TIMES_S if forward_times else 0.0,
    )
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:
        loading = beside.submit(load_text_parts, compiled, timeline)
        runner, plan, group = start_runner(settings, compiled, timeline, early)
        end: Callable[[], None] = partial(shut_down, runner, group)
        try:
            tokenizer, defaults, default_params = loading.result()
            step_runner = make_step_runner(runner, group)
            speculation = _speculation(compiled.config, runner, step_runner, timeline)
            scheduler = _make_scheduler(compiled.config, runner, speculation)
            end = partial(_in_turn, scheduler.close, end)
            if compiled.config.runtime.kv_offloading_size:
                from mllm_compile.engine.start.tiers import put_tiers_behind

                assert isinstance(scheduler, Scheduler), "resolution/tiers.py refuses other ranks"
                with timeline.stage("take host memory"):
                    tell = None if group is None else group.tell
                    put_tiers_behind(scheduler, runner, compiled.artifact.factors, timeline, tell)
            _remember(compiled, runner, plan, timeline)
            files, tower = text_files(compiled), tower_of(runner, compiled)
            adapters = adapter_parts(compiled, runner, None if group is None else group.tell)
            reads_images = runner.model.sources is None and any(name in files for name in PROCESSOR_FILES)
            if isinstance(tower, str) and reads_images:
                timeline.announce(f"images will be refused: {tower}")
            eos_token_ids = ends_of_answers(defaults, tokenizer, runner.vocab_size, timeline)
            most_threads = None if group is None else group.threads
            is_cpu = runner.device.type == "cpu"
            use_threads_of_cpu = prepare_threads(compiled, runner, timeline, most_threads) if is_cpu else _nothing
            _tell_ready(compiled, runner, speculation, timeline)
            return EngineParts(
                scheduler=scheduler,
                step_runner=step_runner,
                tokenizer=tokenizer,
                vocab_size=runner.vocab_size,
                eos_token_ids=eos_token_ids,
                default_params=default_params,
                check_device=device_check(runner.device, group),
                check_idle=_nothing if group is None else group.check,
                shutdown=end,
                prepare_thread=partial(_in_turn, use_threads_of_cpu, step_runner.prepare_thread),
                grammars=grammars(tokenizer, runner.vocab_size, eos_token_ids, compiled.config),
                media=media_preprocessor(compiled, files, scheduler.config.max_model_len, tower),
                config=compiled.config,
                folder=compiled.folder,
                tokenizer_files=files,
                forward_times=tuple if runner.forward_times is None else runner.forward_times.medians,
                experts_chosen=runner.experts_chosen,
                snapshot_bytes=runner.state_bytes_per_request,
                tower=tower,
                adapters=adapters,
                decoder=decoder_prompts(runner, defaults, tokenizer, files, timeline),
                live=_live_weights(runner, group),
                memory=_sleeping_memory(runner),
                num_local=1 if group is None else group.num_local,
                tell_ranks=None if group is None else group.tell,
                ask_ranks=None if group is None else group.least,
                wait_ranks=_nothing if group is None else group.wait_taken,
            )
        except BaseException:  # also Ctrl-C
            end()
            raise


def _make_scheduler(
    config: ResolvedConfig, runner: ModelRunner, speculation: Speculation | None
) -> Scheduler | DataParallelScheduler:
    limits = SchedulerConfig.of(
        config.runtime,
        config.cudagraph,
        runner.token_to_kv_pool.num_pages,
        runner.num_snapshots,
        runner.model.rope,
        runner.attn_backend.query_blocks,
        runner.max_source_len,
    )
    num_ranks = config.runtime.expert_parallel_size
    if num_ranks == 1:
        return Scheduler(limits, speculation=speculation)
    return DataParallelScheduler(limits, num_ranks, speculation)


def _live_weights(runner: ModelRunner, group: RankGroup | None) -> LiveWeights | str:
    """The weights, for updates; a text: why they stay."""
    if runner.model.live is None:
        return "runtime.skip_compiled is set, which serves Transformers' own model: its weights cannot be updated."
    if runner.pipeline is not None:
        return "runtime.pipeline_parallel_size is set: weights of stages cannot be updated. Set tensor_parallel_size."
    if group is not None and group.has_nodes:
        return "Ray has placed ranks on several nodes, where weights cannot be updated. Give one node room for all."
    if runner.model.images is not None:
        return "layers of the model attend to images, and what they see for running requests is of these weights."
    if runner.model.sources is not None:
        return "the model has an encoder, and what it has read for running requests is of these weights."
    if runner.model.lora is not None and runner.model.lora.pool.scaled:
        return "lora.dora is set: scales of adapters are of the norms of these weights. Leave it out to update them."
    return runner.model.live


def _sleeping_memory(runner: ModelRunner) -> SleepingMemory | str:
    """The memory that is given back while the engine sleeps; a text: why none is."""
    if not runner.config.runtime.enable_sleep_mode:
        return "runtime.enable_sleep_mode is not set, without which memory stays. Set it, or use level 0."
    return runner.sleeping_memory()


def _speculation(
    config: ResolvedConfig, runner: ModelRunner, steps: StepRunner | RankedStepRunner, reporter: Reporter
) -> Speculation | None:
    """How tokens are drafted; None: they are not. A line says why, if the config asks for drafts."""
    obstacle = draft_obstacle(runner.config, runner.model, runner.device)
    if obstacle is None or config.speculative.method == "none":
        model = steps.drafter if isinstance(steps, StepRunner) else None  # one rank alone has a draft model
        verifies = None if runner.graph_runner is None else runner.graph_runner.verifies
        captured = None if verifies is None else verifies.most_requests
        chain = None if verifies is None else verifies.chain
        keys_ahead = 0 if chain is None else chain.keys_ahead
        return make_speculation(config.speculative, runner.vocab_size, model, captured, keys_ahead, runner.dp_size)
    reporter.announce(f"no tokens are drafted: {obstacle}")
    return None


def _remember(compiled: CompiledRuntime, runner: ModelRunner, plan: MemoryPlan, timeline: Timeline) -> None:
    """Stores beside the runtime what this device was found to hold, and how long this start took."""
    device = compiled.config.runtime.device
    pool = runner.token_to_kv_pool
    graphs = runner.graph_runner.figures if runner.graph_runner is not None else []
    folder, key = compiled.artifact.measured_folder, device_key(device)
    start = {
        "memory": {
            "weights": num_weight_bytes(compiled),
            "KV cache": pool.num_pages * runner.kv_bytes_per_page,
            "states": runner.state_pool.num_rows * runner.state_bytes_per_request,
            "features of images": runner.feature_bytes,
            "CUDA graphs": round(sum(figure.mib for figure in graphs) * 2**20),
        },
        "plan": plan.to_json(),
        "kv_tokens": runner.max_total_num_tokens,
        "captured": [[figure.kind.name, figure.num_tokens, figure.seconds, figure.mib] for figure in graphs],
        "start": [[span.name, span.start_s, span.end_s, span.depth] for span in timeline.spans],
    }
    write_measured(folder, key, with_start(read_measured(folder, key), compiled.config, start))


def _in_turn(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


def _nothing() -> None:
    """A GPU needs no preparation, and one rank no check."""


def _tell_ready(
    compiled: CompiledRuntime, runner: ModelRunner, speculation: Speculation | None, timeline: Timeline
) -> None:
    """The one line that is always shown."""
    device = "CPU" if runner.device.type == "cpu" else torch.cuda.get_device_name(runner.device)
    num_ranks = compiled.config.runtime.num_ranks
    device = device if num_ranks == 1 else f"{num_ranks} ranks of {device}"
    num_tokens = runner.max_total_num_tokens * compiled.config.runtime.expert_parallel_size
    tokens = f"{num_tokens:,} {'KV ' if runner.model.layers else ''}tokens"
    if runner.model.state_layers:
        tokens += f" · states of {format_bytes(runner.state_bytes_per_request)} a request"
    if speculation is not None:
        tokens += f" · drafts by {compiled.config.speculative.method}"
    timeline.tell(f"ready in {timeline.age_s:.1f} s · {device} · {compiled.config.model.dtype} · {tokens}")
