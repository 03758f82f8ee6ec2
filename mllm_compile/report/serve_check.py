"""Says what a server of a model would be, without loading it (`mllm-compile serve MODEL --check`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mllm_compile.compiler.load_or_compile import open_runtime
from mllm_compile.compiler.target import Target, alike_target, find_target, has_alike_steps
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.device_share import num_states, state_bytes, token_bytes
from mllm_compile.engine.pooling.assemble import longest_text
from mllm_compile.errors import ArtifactError, CheckpointError, UnlikeRowsError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.files.json_file import FolderReader, HeldFiles
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.device.memory import most_kv_budget
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.server.engine_facts import syntax_of
from mllm_compile.store.artifact import TOKENIZER
from mllm_compile.store.measurements import device_key, read_measured, start_with
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.text.tokenizer import Tokenizer, export_tokenizer, load_tokenizer


@dataclass(frozen=True)
class _Known:
    """The part of a model that a server is decided by.

    Attributes:
        origin: where it is from.
        adapter_bytes: of the memory for adapters.
        start: the figures of the last start with this config on this device; {} if there was none.
    """

    config: ResolvedConfig
    origin: str
    layers: Sequence[LayerSpec]
    state_layers: Sequence[StateLayer]
    weight_bytes: int
    adapter_bytes: int
    tokenizer: Tokenizer | None
    start: Mapping[str, Any]
    pooling: PoolingFacts | None = None


def serve_check(source: EngineConfig | Path, reporter: Reporter) -> list[tuple[str, str]]:
    """Lines: a name, and what was decided about it.

    A model that is not compiled is traced, and its checkpoint's headers are read: that says if it can be.

    Raises:
        MllmError: it would not be served, with the reason.
    """
    known = _of_runtime(open_runtime(source, reporter)) if isinstance(source, Path) else _of_config(source, reporter)
    config, runtime = known.config, known.config.runtime
    if known.pooling is not None:
        return _of_pooling(known, known.pooling)
    tokens, how = _kv_tokens(known)
    each = token_bytes(config, known.layers)
    syntax = syntax_of(known.tokenizer)
    has_chat = known.tokenizer is not None and known.tokenizer.has_chat_template
    text = "no tokenizer: token ids only" if known.tokenizer is None else "chat" if has_chat else "no chat template"
    whole = tokens // runtime.max_model_len
    return [
        ("model", f"{config.model.source}  {config.model.dtype}  {runtime.device}"),
        ("runtime", known.origin),
        ("memory", f"weights {known.weight_bytes / 2**30:.2f} GiB, KV {each / 2**10:.1f} KiB a token"),
        *_states(known),
        *_adapters(known),
        *_tiers(known, each),
        ("", f"{tokens:,} KV tokens: {whole:,} requests of {runtime.max_model_len:,} ({how})"),
        ("limits", f"{runtime.max_running_requests} running, prompt and answer {runtime.max_model_len:,} tokens"),
        ("template", f"{text}; {syntax.described()}"),
    ]


def _of_pooling(known: _Known, facts: PoolingFacts) -> list[tuple[str, str]]:
    """The lines of a model that pools."""
    config = known.config
    return [
        ("model", f"{config.model.source}  {config.model.dtype}  {config.runtime.device}"),
        ("runtime", known.origin),
        ("memory", f"weights {known.weight_bytes / 2**30:.2f} GiB"),
        ("tasks", f"{', '.join(facts.tasks)}; pooled by {', '.join(facts.rules)}"),
        ("limits", f"texts of {longest_text(config, facts):,} tokens"),
    ]


def _tiers(known: _Known, token_bytes: float) -> list[tuple[str, str]]:
    """The memory behind the KV cache, where there is some.

    Args:
        token_bytes: of KV.
    """
    runtime, lines = known.config.runtime, []
    named = "" if runtime.kv_offloading_memory_file is None else f", in {runtime.kv_offloading_memory_file}"
    for size, where in (
        (runtime.kv_offloading_size, f"of the host's memory{named}"),
        (runtime.kv_offloading_disk_size, f"in {runtime.kv_offloading_disk_path}"),
    ):
        if size:
            share = "" if not known.state_layers else ", half of it for states"
            tokens = f"{int(size * 2**30 / token_bytes):,} KV tokens" if token_bytes else "states alone"
            lines.append(("", f"behind it {size:g} GiB {where}: {tokens}{share}"))
    return lines


def _of_runtime(opened: CompiledRuntime, config: ResolvedConfig | None = None) -> _Known:
    """
    Args:
        config: served with; None: the one that the runtime was compiled with. Fields that only serving needs may
            differ.
    """
    artifact, folder, config = opened.artifact, opened.folder, config or opened.config
    return _Known(
        config,
        f"compiled: {folder}",
        artifact.program.layers,
        artifact.program.state_layers,
        sum(spec.num_bytes for spec in artifact.weights),
        _adapter_bytes(artifact.program),
        load_tokenizer(folder / TOKENIZER, HeldFiles(artifact.texts, TOKENIZER + "/")),
        start_with(read_measured(artifact.measured_folder, device_key(config.runtime.device)), config),
        None if artifact.program.pooling is None else artifact.program.pooling.facts,
    )


def _of_config(config: EngineConfig, reporter: Reporter) -> _Known:
    target = find_target(config)
    try:
        opened = open_runtime(target.folder, reporter)
        if has_alike_steps(target, opened.artifact):
            target = alike_target(config, target)
        return _of_runtime(opened, target.config)
    except (ArtifactError, CheckpointError):  # also without one
        pass
    try:
        return _of_target(target, reporter)
    except UnlikeRowsError:
        return _of_target(alike_target(config, target), reporter)


def _of_target(target: Target, reporter: Reporter) -> _Known:
    """Traces a model that is not compiled.

    Raises:
        UnsupportedModelError, CheckpointError: it cannot be.
    """
    from mllm_compile.compiler.lora import with_lora
    from mllm_compile.compiler.lowering import build_model, private_inductor_cache
    from mllm_compile.compiler.pooling import lower_any
    from mllm_compile.compiler.weight_plan import plan_lowered_weights

    with TemporaryDirectory(prefix="mllm-check-") as name, private_inductor_cache(Path(name)):
        scratch = Path(name)
        built = build_model(target.config, target.model, reporter)
        lowered = lower_any(target.config, built, target.model, scratch, reporter)
        lowered = with_lora(target.config, lowered, scratch, reporter)
        _, weights, _ = plan_lowered_weights(lowered)
        tokenizer = scratch / TOKENIZER
        tokenizer.mkdir()
        export_tokenizer(target.model.path, tokenizer, trust_remote_code=target.config.model.trust_remote_code)
        return _Known(
            target.config,
            "not compiled yet, which the server does first; nothing in its trace or its checkpoint is against it",
            lowered.program.layers,
            lowered.program.state_layers,
            sum(spec.num_bytes for spec in weights[0]),
            _adapter_bytes(lowered.program),
            load_tokenizer(target.model.path, FolderReader(tokenizer, CheckpointError)),  # messages name the model's
            {},
            None if lowered.program.pooling is None else lowered.program.pooling.facts,
        )


def _states(known: _Known) -> list[tuple[str, str]]:
    """The line about states; none for a model without them."""
    if not known.state_layers:
        return []
    each = state_bytes(known.config, known.state_layers)
    return [("", f"states {each / 2**20:.2f} MiB a request, {num_states(known.config) * each / 2**30:.2f} GiB for all")]


def _adapter_bytes(program: Program) -> int:
    """Bytes of a rank's memory for adapters."""
    return 0 if program.lora is None else program.lora.layout.num_bytes


def _adapters(known: _Known) -> list[tuple[str, str]]:
    """The line about adapters; none for a model without them."""
    if not known.adapter_bytes:
        return []
    lora = known.config.lora
    size = format_bytes(known.adapter_bytes)
    return [("", f"adapters {size}: {lora.max_adapters} at once, of rank {lora.max_rank} or less")]


def _kv_tokens(known: _Known) -> tuple[int, str]:
    """Tokens that the KV cache will hold, and how that is known.

    Raises:
        DeviceMemoryError: not one request fits.
    """
    if known.start:
        return known.start["kv_tokens"], "measured by the last start with this config"
    config, runtime = known.config, known.config.runtime
    budget = most_kv_budget(known.weight_bytes, runtime, torch.device(runtime.device))
    budget = budget.without(num_states(config) * state_bytes(config, known.state_layers), "states")
    budget = budget.without(known.adapter_bytes, "adapters")
    pages = budget.num_pages(runtime.page_size * token_bytes(config, known.layers), runtime) - 1
    return pages * runtime.page_size, budget.explanation
