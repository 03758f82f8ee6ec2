"""Runs decode steps of our own engine under the profiler, in a worker process.

With `ranges` every piece call is a range of the trace and tells its shapes, and each layer between two is a range. That
needs a runner without CUDA graphs, whose kernels have no ranges.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.limits.roofline import AttentionFacts, MatrixFacts, PieceFacts, StepFacts
from mllm_compile.bench.limits.step_parts import context_kv_bytes, may_be_in_fp8, token_kv_bytes
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import WARM_STEPS, StepWork
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.rounds import repeated
from mllm_compile.bench.trace.chrome_trace import LAYER_RANGE, PIECE_RANGE, STEP_RANGE, TracedKernel, read_steps
from mllm_compile.bench.trace.decode_steps import endless_requests, model_runner, prefilled
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.process.progress import reporter_for
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.linked_steps import PieceFunction
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep, StateStep, Step
from mllm_compile.runtime.runner_config import RunnerConfig


def trace_steps(setting: Setting, work: StepWork, ranges: bool) -> list[dict[str, Any]]:
    """
    Args:
        setting: with `cudagraph.mode: none` among its changes when `ranges` is asked for.
        work: each request has about as many tokens as it says in the middle of the steps.
        ranges: mark the pieces and describe them.

    Returns:
        Of each batch: kernels: of the typical step, as TracedKernel's fields; wall_us: a step's median time with no
        profiler on; facts: StepFacts, or None without `ranges`.
    """
    parts = assemble(setting.engine_config(), reporter_for(plain_lines=True))
    try:
        return [trace_step(parts, setting, work, batch, ranges) for batch in work.batches]
    finally:
        parts.shutdown()


def trace_step(parts: EngineParts, setting: Setting, work: StepWork, batch: int, ranges: bool) -> dict[str, Any]:
    """A step of `batch` requests, as trace_steps gives it."""
    runner = model_runner(parts)
    requests = endless_requests(setting, batch, work.prompt_len)
    step = prefilled(parts, requests)
    recorder = _PieceRecorder(runner.model.executor, runner.config) if ranges else None
    walls = repeated(lambda: wall_seconds(step), work.steps_before - WARM_STEPS, WARM_STEPS)
    kernels = _profile(step, work.steps, on_gpu=runner.device.type == "cuda")
    for request in requests:
        parts.scheduler.abort(request)
    return {
        "kernels": [asdict(kernel) for kernel in kernels],
        "wall_us": statistics.median(walls) * 1e6,
        "facts": None if recorder is None else asdict(recorder.facts(batch, work.context)),
    }


def _profile(step: Callable[[], None], steps: int, on_gpu: bool) -> list[TracedKernel]:
    """The kernels of the typical step: the commonest sequence of names, each with its median time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            with torch.profiler.record_function(STEP_RANGE):
                step()
    with tempfile.TemporaryDirectory(prefix="mllm-bench-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        traced = read_steps(json.loads(path.read_text(encoding="utf-8")), on_gpu)
    kernels = typical_step(traced)
    if not kernels:
        raise BenchmarkError(
            "the profiler saw no kernels. Another profiler may hold the GPU, or its counters may be for root alone; "
            "see torch.profiler's warnings above."
        )
    return kernels


def typical_step(steps: Sequence[list[TracedKernel]]) -> list[TracedKernel]:
    """One step out of several: a page boundary or a late arrival is no typical one."""
    sequences = [tuple(kernel.name for kernel in kernels) for kernels in steps]
    commonest = Counter(sequences).most_common(1)[0][0]
    alike = [kernels for kernels, sequence in zip(steps, sequences, strict=True) if sequence == commonest]
    return [
        replace(
            column[0],
            start_us=statistics.median(kernel.start_us for kernel in column),
            us=statistics.median(kernel.us for kernel in column),
        )
        for column in zip(*alike, strict=True)
    ]


class _PieceRecorder:
    """Marks every piece call in the trace, and the layer behind it, and notes the call's inputs and outputs."""

    def __init__(self, executor: ProgramExecutor, config: RunnerConfig) -> None:
        self._program = executor.program
        self._config = config
        self._weights = executor.weights
        self._activation_bytes: dict[int, tuple[int, int]] = {}  # by piece call: in, out
        self._layer: torch.profiler.record_function | None = None  # the range of the layer that runs
        executor.wrap_pieces(self._wrap)

    def _wrap(self, piece: str, index: int, function: PieceFunction) -> PieceFunction:
        step = self._program.steps[index]
        is_activation = [name not in self._weights for name in step.inputs] if isinstance(step, PieceStep) else []

        following = self._program.steps[index + 1 : index + 2]
        has_layer_behind = bool(following) and not isinstance(following[0], PieceStep)

        def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            if self._layer is not None:
                self._layer.__exit__(None, None, None)
                self._layer = None
            # Before the call: a piece may empty the list. A piece's inputs for writing the KV cache come last, and
            # count with its attention.
            leaves_rotation = any(tensor.numel() == 0 for tensor in inputs[len(is_activation) :])
            idle = self._idle_values(index, leaves_rotation)
            own = zip(step.reads, inputs[: len(is_activation)], is_activation, strict=True)
            in_bytes = sum(tensor.nbytes for name, tensor, counts in own if counts and name not in idle)
            with torch.profiler.record_function(f"{PIECE_RANGE}{index}"):
                outputs = function(inputs)
            written = (tensor for name, tensor in zip(step.writes, outputs, strict=True) if name not in idle)
            self._activation_bytes[index] = (in_bytes, sum(tensor.nbytes for tensor in written))
            if has_layer_behind:
                self._layer = torch.profiler.record_function(f"{LAYER_RANGE}{index + 1}")
                self._layer.__enter__()
            return outputs

        return run

    def _idle_values(self, index: int, leaves_rotation: bool) -> set[str]:
        """Values that the piece at `index` neither reads nor writes for others in this step. Where it leaves the
        rotation to attention: q, k and the angles; otherwise the inputs of q and k."""
        step, behind = self._program.steps[index], self._program.steps[index + 1 : index + 2]
        rope_inputs = behind[0].rope_inputs if behind and isinstance(behind[0], AttentionStep) else None
        if rope_inputs is None:
            return set()
        q, k, *angles = rope_inputs.values[:4]
        if not leaves_rotation:
            return {q, k}
        return {*behind[0].reads[:2], *(name for name in angles if name in step.reads)}

    def facts(self, batch: int, context: int) -> StepFacts:
        """Facts of the steps that ran."""
        steps = self._program.steps
        last = max(self._activation_bytes)
        return StepFacts(
            rows=batch,
            pieces=tuple(
                PieceFacts(index, *self._activation_bytes[index], self._matrices(steps[index]))
                for index in sorted(self._activation_bytes)
            ),
            attentions=tuple(
                self._attention(index - 1, step.layer, batch, context)
                if isinstance(step, AttentionStep)
                else self._state(index - 1, step.layer, batch)
                for index, step in enumerate(steps)
                if isinstance(step, AttentionStep | StateStep)
            ),
            logits_bytes=self._activation_bytes[last][1],
        )

    def _matrices(self, step: Step) -> tuple[MatrixFacts, ...]:
        """Weights that a piece multiplies with, in order of use; not the table that token ids look up."""
        if not isinstance(step, PieceStep):
            return ()
        names = [name for name in step.inputs if name in self._weights and self._weights[name].dim() > 1]
        names = [name for name in names if tuple(self._weights[name].shape) not in self._of_states]
        if "input_ids" in step.inputs:
            names = names[1:]
        quantised = self._program.quantised_weights
        scales = {name for one in quantised.values() for name in (one.scales, one.zeros)}
        return tuple(self._matrix(name) for name in names if name not in scales)

    def _matrix(self, name: str) -> MatrixFacts:
        weight, quantised = self._weights[name], self._program.quantised_weights.get(name)
        experts = self._program.expert_weights.get(name)
        if quantised is None:
            return MatrixFacts(name, tuple(weight.shape), weight.dtype.itemsize, experts)
        tensors = [self._weights[one] for one in (name, quantised.scales, quantised.zeros) if one is not None]
        return MatrixFacts(
            name,
            (quantised.outputs, quantised.inputs),
            self._config.dtype.itemsize,
            experts,
            quantised_bytes=sum(tensor.nbytes for tensor in tensors),
            may_be_in_fp8=may_be_in_fp8(self._program, name, weight.dtype),
        )

    @property
    def _of_states(self) -> set[tuple[int, ...]]:
        """Shapes of weights that layers with a state read: convolutions' weights, and the rates of Mamba-1's scan."""
        shapes = set()
        for layer in self._program.state_layers:
            if layer.kind.holds_inputs:
                columns, channels = layer.state_shape
                shapes |= {(channels, columns + 1), (channels, 1, columns + 1)}
            else:
                shapes.add(layer.state_shape)
        return shapes

    def _state(self, after_piece: int, layer_name: str, batch: int) -> AttentionFacts:
        layer = next(layer for layer in self._program.state_layers if layer.name == layer_name)
        state_dtype = layer.state_dtype(self._config.runtime.state_dtype)
        held = math.prod(layer.state_shape) * getattr(torch, state_dtype).itemsize
        token = math.prod(layer.out_shape) * getattr(torch, layer.out_dtype).itemsize
        return AttentionFacts(after_piece, layer_name, 2 * batch * held, 2 * batch * token, what="state")

    def _attention(self, after_piece: int, layer_name: str, batch: int, context: int) -> AttentionFacts:
        layer = next(layer for layer in self._program.layers if layer.name == layer_name)
        kv_cache_dtype = self._config.kv_cache_dtype
        query_and_out = layer.num_heads * (layer.query_dim + layer.out_dim) * self._config.dtype.itemsize
        up_bytes = 0 if layer.up_projection is None else self._weights[layer.up_projection].nbytes
        return AttentionFacts(
            after_piece=after_piece,
            name=layer_name,
            kv_bytes=batch * context_kv_bytes(layer, context, kv_cache_dtype),
            new_bytes=batch * (token_kv_bytes(layer, kv_cache_dtype) + query_and_out) + up_bytes,
        )
