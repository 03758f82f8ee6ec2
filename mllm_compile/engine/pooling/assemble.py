"""Makes the parts of an engine that pools from a runtime that is opened: the model on its device, and its thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.engine.pooling.calls import PoolingCalls, TaskRules
from mllm_compile.engine.pooling.core import PoolingCore
from mllm_compile.engine.pooling.parts import PoolingParts
from mllm_compile.engine.pooling.texts import TextReader
from mllm_compile.files.json_file import HeldFiles
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.device.cpu_threads import threads_for, use_threads
from mllm_compile.runtime.device.open import open_device, prefer_cublaslt
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.pooling.queue import TextQueue
from mllm_compile.runtime.pooling.runner import PoolingRunner
from mllm_compile.store.artifact import TOKENIZER
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.source import ArtifactSource
from mllm_compile.text.tokenizer import load_tokenizer


def pooling_parts(compiled: CompiledRuntime, files: Mapping[str, bytes], timeline: Timeline) -> PoolingParts:
    """The parts of a runtime, loaded.

    Args:
        files: the tokenizer's.

    Raises:
        MllmError: of the kind that says what is wrong with the runtime, the weights or the device.
    """
    config = compiled.config
    with timeline.stage("load tokenizer"):
        tokenizer = load_tokenizer(compiled.folder / TOKENIZER, HeldFiles(files))
    device = open_device(config.runtime.device)
    if device.type == "cuda":
        prefer_cublaslt()
    source = ArtifactSource(compiled, timeline)
    runner = PoolingRunner(source.load(device), device, config.cudagraph.piecewise_tokens)
    if runner.graphs is not None:
        sizes = len(config.cudagraph.piecewise_tokens)
        timeline.note(f"CUDA graphs: {sizes} in {runner.graphs.seconds:.1f} s, {runner.graphs.mib:.0f} MiB")
    limits, most = config.runtime, longest_text(config, runner.facts)
    core = PoolingCore(
        runner,
        TextQueue(limits.max_num_batched_tokens, limits.max_running_requests * _TEXTS_OF_A_REQUEST),
        prepare_thread=_threads(compiled, device, timeline),
        check_device=partial(_check, device),
        shutdown=partial(_give_back, runner, device),
    )
    vocab_size = compiled.artifact.sizes.vocab_size
    reader = TextReader(tokenizer, runner.facts, vocab_size, most)
    pooling = compiled.artifact.program.pooling
    has_dense = pooling is not None and pooling.head is not None
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    kind = ", ".join(runner.facts.tasks)
    timeline.tell(f"ready in {timeline.age_s:.1f} s · {name} · {config.model.dtype} · {kind} of up to {most:,} tokens")
    return PoolingParts(
        calls=PoolingCalls(core, reader, TaskRules(runner.facts, has_dense)),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        config=config,
        folder=compiled.folder,
        tokenizer_files=files,
    )


_TEXTS_OF_A_REQUEST = 8  # of a step, for each of runtime.max_running_requests: texts are short, and hold no pages


def longest_text(config: ResolvedConfig, facts: PoolingFacts) -> int:
    """Most tokens of a text: the model's own limit, or runtime.max_model_len where that is set."""
    most = config.runtime.max_model_len
    is_auto = any(choice.key == "runtime.max_model_len" for choice in config.choices) or not config.choices
    return min(most, facts.max_length) if is_auto and facts.max_length else most


def _threads(compiled: CompiledRuntime, device: torch.device, timeline: Timeline) -> Callable[[], None]:
    if device.type != "cpu":
        return lambda: torch.cuda.set_device(device)
    threads = threads_for(sum(spec.num_bytes for spec in compiled.artifact.weights))
    timeline.note(f"CPU threads: {threads.count} ({threads.why})")
    return lambda: use_threads(threads.count)


def _check(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # after a step that ran out of memory
        torch.ones(1, device=device).item()


def _give_back(runner: PoolingRunner, device: torch.device) -> None:
    runner.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()
