"""Makes the parts of an engine from a config: the cached runtime loaded, pools allocated, graphs captured.

Everything that is slow to import or needs the device is here and below; Engine imports it when it is made. A warm
start runs this too, so it may not import Transformers, Dynamo or Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.sources import EngineSource, config_or_runtime, runtime_settings
from mllm_compile.engine.adapter_parts import adapter_parts
from mllm_compile.engine.cpu_threads import prepare_threads
from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.engine.engine_parts import EngineParts
from mllm_compile.engine.memory_plan import MemoryPlan, situation
from mllm_compile.engine.pooling.assemble import pooling_parts
from mllm_compile.engine.pooling.parts import PoolingParts
from mllm_compile.errors import ConfigError, DamagedWeightsError, DeviceMemoryError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.files.json_file import HeldFiles
from mllm_compile.media.files import CONFIG_FILE, PROCESSOR_FILES
from mllm_compile.media.log_mel import read_log_mel
from mllm_compile.media.preprocessor import MediaPreprocessor
from mllm_compile.process.progress import Reporter
from mllm_compile.process.timeline import Timeline, timeline_of
from mllm_compile.ranks.early_start import EarlyRanks, early_ranks
from mllm_compile.runtime.device.sleep import SleepingMemory
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.loaded import ModelSource
from mllm_compile.runtime.runner_config import MOST_VERIFIED, RunnerConfig
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.runtime.state.factory import draft_obstacle
from mllm_compile.runtime.step.runner import StepRunner
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.store.artifact import TOKENIZER
from mllm_compile.store.contents import remove_runtime
from mllm_compile.store.measurements import device_key, read_measured, start_with, with_start, write_measured
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.shared_weights import num_weight_bytes
from mllm_compile.store.source import ArtifactSource, runner_config
from mllm_compile.structured.grammars import Grammars
from mllm_compile.structured.vocabulary import Vocabulary
from mllm_compile.text.added_tokens import told_to_split
from mllm_compile.text.generation_defaults import GenerationDefaults, default_params, load_generation_defaults
from mllm_compile.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mllm_compile.ranks.group import RankGroup
    from mllm_compile.ranks.launch_local import Launcher
    from mllm_compile.ranks.nodes import Nodes
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
        remove_runtime(compiled.folder)
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
        runner, plan, group = _start_runner(settings, compiled, timeline, early)
        end: Callable[[], None] = partial(_shut_down, runner, group)
        try:
            tokenizer, defaults, default_params = loading.result()
            config, num_pages = compiled.config, runner.token_to_kv_pool.num_pages
            limits = SchedulerConfig.of(
                config.runtime,
                config.cudagraph,
                num_pages,
                runner.num_snapshots,
                runner.model.rope,
                runner.attn_backend.query_blocks,
                runner.max_source_len,
            )
            num_ranks = config.runtime.expert_parallel_size
            step_runner = _step_runner(runner, group)
            speculation = _speculation(config, runner, step_runner, timeline)
            scheduler = (
                Scheduler(limits, speculation=speculation)
                if num_ranks == 1
                else DataParallelScheduler(limits, num_ranks, speculation)
            )
            end = partial(_in_turn, scheduler.close, end)
            if config.runtime.kv_offloading_size:
                from mllm_compile.engine.tier_parts import put_tiers_behind

                assert isinstance(scheduler, Scheduler), "resolve_tiers.py refuses other ranks"
                with timeline.stage("take host memory"):
                    tell = None if group is None else group.tell
                    put_tiers_behind(scheduler, runner, compiled.artifact.factors, timeline, tell)
            _remember(compiled, runner, plan, timeline)
            files, tower = text_files(compiled), tower_of(runner)
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
                check_device=_device_check(runner.device, group),
                check_idle=_nothing if group is None else group.check,
                shutdown=end,
                prepare_thread=partial(_in_turn, use_threads_of_cpu, step_runner.prepare_thread),
                grammars=_grammars(tokenizer, runner.vocab_size, eos_token_ids, compiled.config),
                media=media_preprocessor(compiled, files, limits.max_model_len, tower),
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
                tell_ranks=None if group is None else group.tell,
                ask_ranks=None if group is None else group.least,
                wait_ranks=_nothing if group is None else group.wait_taken,
            )
        except BaseException:  # also Ctrl-C
            end()
            raise


def _live_weights(runner: ModelRunner, group: RankGroup | None) -> LiveWeights | str:
    """The weights, for updates; a text: why they stay."""
    if runner.model.live is None:
        return "runtime.skip_compiled is set, which serves Transformers' own model: its weights cannot be updated."
    if runner.pipeline is not None:
        return "runtime.pipeline_parallel_size is set: weights of stages cannot be updated. Set tensor_parallel_size."
    if group is not None and group.has_nodes:
        return "Ray has placed ranks on several nodes, where weights cannot be updated. Give one node room for all."
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


def decoder_prompts(
    runner: ModelRunner,
    defaults: GenerationDefaults,
    tokenizer: Tokenizer | None,
    files: Mapping[str, bytes],
    reporter: Reporter,
) -> DecoderPrompts | None:
    """The decoder's side of prompts, of an encoder-decoder; None of another model.

    Raises:
        ConfigError: its files name no token that a decoder begins with.
    """
    sources = runner.model.sources
    if sources is None:
        return None
    start, vocab_size = defaults.decoder_start, runner.vocab_size
    if not start or max(start) >= vocab_size:
        raise ConfigError(
            "the model has a decoder, which begins with decoder_start_token_id: expected a token id below "
            f"{vocab_size} in generation_config.json or config.json, got {start[:1] or 'none'}. Correct it in the "
            "model's folder."
        )
    if defaults.not_applied:
        reporter.announce(f"generation_config.json's {', '.join(defaults.not_applied)} are not applied")
    facts = replace(sources.facts, max_length=runner.max_source_len)
    log_mel = read_log_mel(files, facts.bins, facts.frames) if facts.is_sound else "the encoder reads texts"
    return DecoderPrompts(start, vocab_size, facts, tokenizer, log_mel)


def tower_of(runner: ModelRunner) -> Tower | str:
    """The tower that prompts with images are checked with, or why they are refused."""
    runtime, media = runner.config.runtime, runner.model.media
    if runner.pipeline is not None:
        return "runtime.pipeline_parallel_size is set, under which text alone is served"
    if media is None:
        return "the model takes text alone, or images by a protocol that is not served (docs/images.md)"
    if runtime.skip_compiled:
        return "runtime.skip_compiled is set, under which text alone is served"
    if runtime.deterministic and media.facts.sees_ahead:
        return (
            "runtime.deterministic is set, under which every token is a row that sees what is before it, and tokens of "
            "this model's images see those behind them too: text alone is served"
        )
    return media.facts


def media_preprocessor(
    compiled: CompiledRuntime, files: Mapping[str, bytes], max_model_len: int, tower: Tower | str
) -> MediaPreprocessor:
    """The preprocessor of images and videos of prompts.

    Args:
        files: as text_files gives them.
        tower: as tower_of gives it.
    """
    config = compiled.config
    why_not = tower if isinstance(tower, str) else None
    return MediaPreprocessor(config.model.source, files, max_model_len, why_not, config.media.allowed_domains)


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


def _start_runner(
    settings: RunnerConfig, compiled: CompiledRuntime, timeline: Timeline, early: EarlyRanks
) -> tuple[ModelRunner, MemoryPlan, RankGroup | None]:
    """A runner with the KV pages of an earlier start where they still hold, the plan for the next one, and the other
    ranks where there are some."""
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
        ConfigError: there is no secret, or no Ray, or Ray's nodes do not have what is asked for.
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
    from mllm_compile.config.device import detect_device
    from mllm_compile.ranks.admission import node_secret
    from mllm_compile.ranks.node import hello_of
    from mllm_compile.ranks.nodes import Nodes

    each = runtime.num_ranks // runtime.nnodes
    own = hello_of(compiled.artifact, 0, 0, runtime.nnodes, detect_device(runtime.device).name)
    node_of = {rank: rank // each for rank in range(each, runtime.num_ranks)}
    return launcher, timeline, Nodes(runtime.master_addr, runtime.master_port, node_of, node_secret(), own)


def _step_runner(runner: ModelRunner, group: RankGroup | None) -> StepRunner | RankedStepRunner:
    sampler = Sampler(runner.model.sampling)
    if group is None:
        return StepRunner(runner, sampler)
    from mllm_compile.ranks.steps import RankedStepRunner, StagedStepRunner

    computes_at_once = runner.device.type == "cpu" and group.num_stages > 1
    kind = StagedStepRunner if computes_at_once else RankedStepRunner
    return kind(StepRunner(runner, sampler, group.announce), group)


def _shut_down(runner: ModelRunner, group: RankGroup | None) -> None:
    runner.shutdown()  # first: graphs hold calls of the group
    if group is not None:
        group.close()


def load_text_parts(
    compiled: CompiledRuntime, timeline: Timeline
) -> tuple[Tokenizer | None, GenerationDefaults, SamplingParams]:
    """The tokenizer, None where the model has none, and what its generation_config.json says of answers."""
    with timeline.stage("load tokenizer"):
        tokenizer = load_tokenizer(compiled.folder / TOKENIZER, HeldFiles(text_files(compiled)))
        defaults = load_generation_defaults(compiled.folder, HeldFiles(compiled.artifact.texts))
        return tokenizer, defaults, default_params(defaults, compiled.folder)


def text_files(compiled: CompiledRuntime) -> dict[str, bytes]:
    """The files of the tokenizer and of the processor: the bytes that were hashed, not those that a file has now."""
    start = TOKENIZER + "/"
    texts = compiled.artifact.texts
    files = {name.removeprefix(start): data for name, data in texts.items() if name.startswith(start)}
    if files and compiled.config.model.split_special_tokens:
        files = told_to_split(files, compiled.folder / TOKENIZER)
    if any(name in files for name in PROCESSOR_FILES):
        files[CONFIG_FILE] = texts[CONFIG_FILE]
    return files


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


def ends_of_answers(
    defaults: GenerationDefaults, tokenizer: Tokenizer | None, vocab_size: int, reporter: Reporter
) -> frozenset[int]:
    """The end-of-sequence ids that the model can sample; the tokenizer's where the model's files name none.

    min_tokens forbids columns of the logits: an id beyond them would fail every request of its step.
    """
    named = defaults.eos_token_ids
    if not named and tokenizer is not None and tokenizer.eos_token_id is not None:
        named = frozenset({tokenizer.eos_token_id})
    known = frozenset(token_id for token_id in named if token_id < vocab_size)
    if known != named:
        ends = "others end answers" if known else "answers end at max_tokens or a stop text alone"
        reporter.announce(
            f"eos_token_id {short_repr(min(named - known))} is beyond the model's vocabulary of {vocab_size} and never "
            f"sampled: {ends}"
        )
    return known


def _grammars(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int], config: ResolvedConfig
) -> Grammars | None:
    """Compiles forms of answers; nothing of it happens before a request asks for one."""
    if tokenizer is None:
        return None
    asked = config.structured_outputs

    def read_vocabulary() -> Vocabulary:
        names = tokenizer.special_token_ids, tokenizer.token_to_id("<|notimestamps|>")
        return Vocabulary.of(tokenizer.token_bytes(vocab_size), eos_token_ids, *names)

    return Grammars(read_vocabulary, asked.backends, asked.threads)


def _device_check(device: torch.device, group: RankGroup | None) -> Callable[[], None]:
    """Raises when the device does not compute any more, as after an illegal memory access; or not with the others."""

    def check() -> None:
        if group is not None:
            group.check_after_failure()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # after a step that ran out of memory
            torch.ones(1, device=device).item()

    return check
