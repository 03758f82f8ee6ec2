"""Milliseconds and host microseconds of a decode step without graphs, with piecewise graphs and with full ones.

    python -m benchmarks.steps.graph_modes_speed configs/qwen.yaml [--tokens 512] [--batches 1 8 64 256]

Needs an NVIDIA GPU. A step is planning attention and running the model; sampling is left out. Steps are issued one
behind another, as in serving. "breakable" is a capture that stops at each attention, runs it, and goes on. Graphs that
are split at attentions are compared with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.script import need_gpu, parser_of, positive, told_in_one_line
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.bench.timing.record import append_record
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.cuda_graph.capture import GraphCapturer
from mllm_compile.runtime.cuda_graph.kind import BatchGraphs
from mllm_compile.runtime.forward_batch import ForwardBatch, TokenInputs
from mllm_compile.runtime.forward_context import override_forward_context
from mllm_compile.runtime.graph_mode import BatchDescriptor, GraphKind
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ops.attention.layer_op import attention_with_output
from mllm_compile.runtime.program import linked_steps
from mllm_compile.store.source import ArtifactSource, runner_config

WARM_UP_STEPS, STEPS, REPEATS = 5, 40, 5


def make_decode_batch(runner: ModelRunner, num_requests: int, num_tokens: int) -> ForwardBatch:
    """Requests of `num_tokens` tokens, their pages one after another."""
    page_size = runner.config.runtime.page_size
    pages_each = -(-num_tokens // page_size)
    pages = torch.arange(1, 1 + num_requests * pages_each, device=runner.device)
    rows = torch.arange(1, num_requests + 1, device=runner.device)
    positions = torch.arange(pages_each, device=runner.device)
    runner.req_to_token_pool.write_pages(
        rows.repeat_interleave(pages_each), positions.repeat(num_requests), pages, page_size
    )
    last_pages = pages.view(num_requests, pages_each)[:, -1]
    return runner.prepare_forward_batch_decode(
        torch.randint(runner.vocab_size, (num_requests,), device=runner.device),
        rows,
        torch.full((num_requests,), num_tokens, dtype=torch.int32, device=runner.device),
        last_pages * page_size + (num_tokens - 1) % page_size,
        seq_lens_cpu=torch.full((num_requests,), num_tokens, dtype=torch.int32),
    )


def steps_by_mode(runner: ModelRunner, batch: ForwardBatch) -> dict[str, Callable[[], object]]:
    """Mode → a function that launches one step of `batch`."""
    graphs = runner.graph_runner
    if graphs is None:
        raise SystemExit("the config captures no graphs; set cudagraph.mode: full_and_piecewise")
    dispatcher, size = graphs.dispatcher, batch.batch_size
    steps: dict[str, Callable[[], object]] = {"none": lambda: runner.run_eager(batch)}
    descriptor = dispatcher.find(GraphKind.PIECEWISE, size)
    pieces = graphs.kinds.get(GraphKind.PIECEWISE)
    if descriptor is not None and isinstance(pieces, BatchGraphs):
        steps["piecewise"] = partial(pieces.replay, batch, descriptor)
        steps["breakable"] = breakable(runner, batch, descriptor)
    if dispatcher.find(GraphKind.DECODE, size) is not None:
        steps["full"] = lambda: graphs.run(batch)
    return steps


def breakable(runner: ModelRunner, batch: ForwardBatch, descriptor: BatchDescriptor) -> Callable[[], object]:
    """One capture of the padded program that is interrupted at every attention; replays are a plain list."""
    graphs, size = runner.graph_runner, descriptor.num_tokens
    assert graphs is not None, "steps_by_mode has seen that there are graphs"
    capturer = GraphCapturer(runner.device)
    segments: list[Callable[[], object]] = []
    recording: list[torch.cuda.CUDAGraph] = []
    keep: list[torch.Tensor] = []  # the pool must not hand out what a later segment reads

    def start() -> None:
        recording.append(torch.cuda.CUDAGraph())
        recording[0].capture_begin(pool=capturer.pool, capture_error_mode="thread_local")

    def stop() -> None:
        graph = recording.pop()
        graph.capture_end()
        segments.append(graph.replay)

    def interrupted(*arguments: Any) -> None:
        stop()
        for argument in arguments:  # one is a list: what q and k are made of
            given = argument if isinstance(argument, list) else [argument]
            keep.extend(one for one in given if isinstance(one, torch.Tensor))
        segments.append(lambda: attention_with_output(*arguments))
        attention_with_output(*arguments)
        start()

    graphs.inputs.take_tokens(batch, size)
    runner.attn_backend.init_forward_metadata(batch)
    inputs = graphs.inputs
    tokens = TokenInputs(inputs.input_ids[:size], inputs.positions[:size], inputs.out_cache_loc[:size])
    with patch.object(linked_steps, "attention_with_output", interrupted), capturer.session():
        start()
        output = runner.program.run(batch, tokens, torch.arange(batch.batch_size, device=runner.device))
        stop()
    keep.append(output.next_token_logits)
    context = runner.program.context(batch, tokens)

    def step() -> object:
        graphs.inputs.take_tokens(batch, size)
        runner.attn_backend.init_forward_metadata(batch)
        with override_forward_context(entered):
            for segment in segments:
                segment()
        return keep[-1]

    with context as entered:
        pass
    return step


def measure(step: Callable[[], object]) -> tuple[float, float]:
    """(ms a step, host µs a step): the median of some runs."""
    for _ in range(WARM_UP_STEPS):
        step()
    step_ms, host_us = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        watch = Stopwatch()
        for _ in range(STEPS):
            step()
        host_us.append(watch.seconds / STEPS * 1e6)
        torch.cuda.synchronize()
        step_ms.append(watch.seconds / STEPS * 1e3)
    return statistics.median(step_ms), statistics.median(host_us)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=positive, default=512, help="of each request")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--json", type=Path, help="also add the figures to this file, as a line")
    arguments = parser.parse_args()
    need_gpu()
    compiled = load_or_compile(EngineConfig.from_yaml(arguments.config))
    runner = ModelRunner(runner_config(compiled.config), ArtifactSource(compiled, NullReporter()))
    runner.initialize()
    results: dict[str, dict[str, tuple[float, float]]] = {}
    for kind in (GraphKind.DECODE, GraphKind.PIECEWISE):
        figures = [figure for figure in runner.graph_runner.figures if figure.kind is kind]
        seconds, mib = sum(f.seconds for f in figures), sum(f.mib for f in figures)
        print(f"captured {kind.name}: {len(figures)} sizes, {seconds:.2f} s, {mib:.0f} MiB")
    print(
        "requests  "
        + "".join(f"{mode + ' ms':>14}{'host µs':>9}" for mode in ("none", "piecewise", "breakable", "full"))
    )
    with torch.inference_mode():
        for num_requests in arguments.batches:
            batch = make_decode_batch(runner, num_requests, arguments.tokens)
            times = {mode: measure(step) for mode, step in steps_by_mode(runner, batch).items()}
            results[str(num_requests)] = times
            row = "".join(
                f"{times[mode][0]:14.3f}{times[mode][1]:9.0f}" if mode in times else " " * 23
                for mode in ("none", "piecewise", "breakable", "full")
            )
            print(f"{num_requests:8}  {row}")
    if arguments.json:
        append_record(arguments.json, __doc__, arguments, results)
    runner.shutdown()


if __name__ == "__main__":
    with told_in_one_line():
        main()
