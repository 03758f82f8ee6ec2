"""Chooses the threads of a CPU's steps when an engine starts: by OMP_NUM_THREADS, by the model's size, or by trial.

A trial's finding is beside the runtime, as other measurements of a device are. It holds for a day: what else runs on
the machine decides too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.device.cpu_threads import threads_for, use_threads, wait_briefly
from mllm_compile.runtime.device.thread_trial import MOST_WEIGHT_BYTES, StepThreads, fastest
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.store.measurements import device_key, read_measured, write_measured
from mllm_compile.store.opened import CompiledRuntime

_PROMPT_TOKENS = 16  # of a trial: enough to compute rather than read
_HOLDS_S = 24 * 60 * 60
_THREADS = "threads"  # of the device's measurements


def prepare_threads(
    compiled: CompiledRuntime, runner: ModelRunner, timeline: Timeline, most: int | None
) -> Callable[[], None]:
    """The function that the engine's thread calls first: it sets as many threads as the model has work for.

    Args:
        most: of one rank, where there are several; None: it is alone.
    """
    weight_bytes = sum(spec.num_bytes for spec in compiled.artifact.weights)
    threads = threads_for(weight_bytes)
    if most is not None and threads.count > most:
        threads = replace(threads, count=most, why=f"of {compiled.config.runtime.num_ranks} ranks each")
    if threads.count > 1:
        wait_briefly()
    if threads.is_given or threads.count == 1 or weight_bytes > MOST_WEIGHT_BYTES or not _is_tried(runner):
        timeline.note(f"CPU threads: {threads.count} ({threads.why})")
        return lambda: use_threads(threads.count)
    found = _found_before(compiled, threads.count)
    if found is None:
        with timeline.stage("try threads"):
            found = try_threads(runner, threads.count)
        _keep(compiled, threads.count, found)
    timeline.note(f"CPU threads: {found.decode} for decodes, {found.prompt} for prompts (by trial, of {threads.count})")
    runner.step_threads = found if found.decode != found.prompt else None
    return lambda: use_threads(found.decode)


def _found_before(compiled: CompiledRuntime, most: int) -> StepThreads | None:
    """Reads the finding of an earlier start on such a CPU; None: it has none, or an old one."""
    kept = read_measured(compiled.artifact.measured_folder, device_key("cpu")).get(_THREADS)
    match kept:
        case {"most": kept_most, "at": float(at), "decode": int(decode), "prompt": int(prompt)}:
            holds = kept_most == most and 0 <= time.time() - at < _HOLDS_S
            return StepThreads(decode, prompt) if holds and {decode, prompt} <= set(range(1, most + 1)) else None
    return None


def _keep(compiled: CompiledRuntime, most: int, found: StepThreads) -> None:
    folder, key = compiled.artifact.measured_folder, device_key("cpu")
    kept = {"most": most, "at": time.time(), "decode": found.decode, "prompt": found.prompt}
    write_measured(folder, key, {**read_measured(folder, key), _THREADS: kept})


def _is_tried(runner: ModelRunner) -> bool:
    """True of one rank whose steps count nothing: those of a trial are of no request.

    In the deterministic mode no clock may choose threads: products have other last bits on another number of them.
    """
    counts_nothing = runner.expert_counts is None and runner.forward_times is None
    return runner.communicator is None and counts_nothing and not runner.config.runtime.deterministic


@torch.inference_mode()
def try_threads(runner: ModelRunner, most: int) -> StepThreads:
    """The fastest threads of a decode and of a prompt, at most `most`. They run on the dummy row."""
    zeros = torch.zeros(_PROMPT_TOKENS, dtype=torch.int64)
    one, new = torch.ones(1, dtype=torch.int32), torch.full((1,), _PROMPT_TOKENS, dtype=torch.int32)
    decode = runner.prepare_forward_batch_decode(zeros[:1], zeros[:1], one, zeros[:1], seq_lens_cpu=one)
    prompt = runner.prepare_forward_batch_extend(zeros, zeros[:1], new, new, torch.zeros_like(new), zeros)
    prompt.logits_indices = new.long() - 1
    before = torch.get_num_threads()
    try:
        return StepThreads(*(fastest(partial(runner.run_eager, batch), most) for batch in (decode, prompt)))
    finally:
        use_threads(before)
