"""The steps of a long prompt beside running answers: each step's time and kernels.

    python -m benchmarks.steps.chunk_steps configs/qwen-8b-shape.yaml [--bounds 25 auto none]
        [--prompt 32000] [--profile 24000]

One engine for all bounds: it captures the sizes of the first, and `runtime.max_step_ms` is set anew for each of them.
The work is `bench gaps`': first the prompt alone, then beside the answers. A step's estimate is what the scheduler
expected before it saw the step (runtime/schedule/step_cost.py). With --profile N the kernels of six steps from N tokens
of context on are summed, on a GPU; a profiled step takes longer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import EngineConfig
from mllm_compile.bench.measure.gaps import measure_gaps
from mllm_compile.bench.measure.workloads import Gaps, GapsWork
from mllm_compile.bench.trace.device_events import device_events, times_by_name
from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.process.console import print_table
from mllm_compile.runtime.schedule.pace import Pace, load_of
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch

PROFILED_STEPS = 6
KERNELS = 24  # rows of the table


class Steps:
    """Notes each step with prompts as the scheduler hears of it; the engine's thread calls it."""

    def __init__(self, profile_from: int | None) -> None:
        self.pace: Pace | None = None
        self.rows: list[tuple[int, int, int, int, float, float]] = []
        self.kernels: dict[str, list[float]] = {}
        self._profile_from = profile_from
        self._trace: profile | None = None
        self._profiled = 0

    def took(self, pace: Pace, batch: ScheduledBatch, ms: float) -> None:
        self.pace = pace
        load, count = load_of(batch), batch.num_decodes
        if not load.prompt_tokens:
            return
        context = int(batch.prefix_lens[count:].max())
        cost, estimate = pace.cost, 0.0
        if cost.knows_prompts:
            prompts = cost.token_ms * load.prompt_tokens + cost.pair_ms * load.prompt_pairs
            estimate = cost.beside_ms(load.num_decodes, load.decode_keys) + prompts
        self.rows.append((count, load.decode_keys, load.prompt_tokens, context, ms, estimate))
        if self._profile_from is not None and count:
            self._trace_from(context)

    def _trace_from(self, context: int) -> None:
        if self._trace is None and context >= self._profile_from and not self._profiled:
            self._trace = profile(activities=[ProfilerActivity.CUDA])
            self._trace.start()
        elif self._trace is not None:
            self._profiled += 1
            if self._profiled == PROFILED_STEPS:
                torch.cuda.synchronize()
                self._trace.stop()
                self.kernels = times_by_name(device_events(self._trace))
                self._trace = None


class Streams:
    """The engine as measure_gaps wants it; closing is left to its maker."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def stream(self, prompt: list[int], max_tokens: int) -> Any:
        params = greedy(max_tokens)
        async for output in self._engine.generate(prompt, params):
            yield len(output.token_ids)

    async def close(self) -> None:
        """Leaves the engine open for the next bound."""


def bound_of(text: str) -> str | float:
    """runtime.max_step_ms as the scheduler has it."""
    if text in ("auto", "none"):
        return {"auto": "tenfold", "none": "none"}[text]
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected milliseconds, auto or none") from None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--bounds", type=bound_of, nargs="+", default=[25.0, "tenfold", "none"])
    parser.add_argument("--prompt", type=positive, default=32_000)
    parser.add_argument("--decodes", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--profile", type=positive, help="tokens of context from which kernels are summed")
    parser.add_argument("--no-steps", action="store_true", help="print no line for each step")
    args = parser.parse_args()
    work = GapsWork(decodes=args.decodes, prompt_len=args.prompt, repeats=args.repeats)
    config = EngineConfig.from_yaml(args.config)
    first = args.bounds[0]
    runtime = {"enable_prefix_cache": False, "max_model_len": work.longest_request}
    runtime["max_step_ms"] = "auto" if first == "tenfold" else first
    steps = Steps(args.profile)
    took = Pace.took

    def noted(pace: Pace, batch: ScheduledBatch, ms: float) -> None:
        steps.took(pace, batch, ms)
        took(pace, batch, ms)

    Pace.took = noted
    engine = AsyncEngine(config.model_copy(update={"runtime": config.runtime.model_copy(update=runtime)}))
    try:
        for bound in args.bounds:
            if steps.pace is not None:
                steps.pace._max_step_ms = bound
            steps.rows.clear()
            seen = measure_gaps(Streams(engine), work, engine.engine.vocab_size)
            report(bound, seen, work, steps, not args.no_steps)
    finally:
        engine.engine.close()
    if steps.kernels:
        print_kernels(steps.kernels)


def report(bound: str | float, seen: list[Gaps], work: GapsWork, steps: Steps, with_steps: bool) -> None:
    """Prints the figures of one bound, and the steps of its last repeat."""
    figures = "; ".join(f"{line.name} {line.median:.1f}" for line in work.measurements(seen))
    print(f"max_step_ms {'auto' if bound == 'tenfold' else bound}: {figures}")
    begins = [index for index, row in enumerate(steps.rows) if row[0] and row[3] == 0 and row[2] > work.decode_len]
    beside = [row for row in steps.rows[begins[-1] if begins else 0 :] if row[0]]
    if beside:
        off = [abs(row[4] / row[5] - 1) for row in beside if row[5]]
        took = sum(row[4] for row in beside)
        how_far = f", {median(off):.1%} off what was expected" if off else ""
        print(f"{len(beside)} steps with its chunks took {took:.0f} ms{how_far}")
    if with_steps:
        names = ("decodes", "their keys", "tokens", "context", "ms", "expected")
        cells = [(*map(str, row[:4]), f"{row[4]:.1f}", f"{row[5]:.1f}") for row in beside]
        print_table(sys.stdout, "steps", names, cells)


def print_kernels(kernels: dict[str, list[float]]) -> None:
    rows = [
        (name[:100], f"{len(times) / PROFILED_STEPS:.1f}", f"{sum(times) / PROFILED_STEPS:.0f}")
        for name, times in list(kernels.items())[:KERNELS]
    ]
    whole = sum(map(sum, kernels.values())) / PROFILED_STEPS
    print_table(sys.stdout, f"kernels of a step, {whole:.0f} µs", ("kernel", "times", "µs"), rows)


if __name__ == "__main__":
    with told_in_one_line():
        main()
