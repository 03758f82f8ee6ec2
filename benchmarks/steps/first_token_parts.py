"""Where the time of a prompt's first token goes: the host's parts of it, one after another, and the GPU's kernels.

    python -m benchmarks.steps.first_token_parts configs/qwen-shape.yaml [--prompt 512] [--prompts 1] [--batched 4096]
    python -m benchmarks.steps.first_token_parts configs/qwen-30b-a3b-shape.yaml --layers 4 --prompt 2048 --prompts 8

Without a GPU it gives the host's parts alone. The parts overlap with the GPU, so they do not add up to the whole; a
part that holds others is followed by them, indented. Each is timed, with when it began after the call did. With
--piecewise no whole step with prompts is captured; with --whole all possible ones are, for any model. With
--layers a shape is cut down to so many, for the shares of its kernels alone. With --cached each prompt has so many
tokens ahead that the prefix cache holds.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.clock import Stopwatch, wall_seconds
from mllm_compile.bench.timing.rounds import with_range
from mllm_compile.bench.trace.device_events import Occupancy, device_events, times_by_name
from mllm_compile.config.resolution.graphs import MIXED_TOKENS
from mllm_compile.engine.core.live_requests import LiveRequests
from mllm_compile.engine.core.loop import EngineCore
from mllm_compile.engine.core.steps import Steps
from mllm_compile.engine.requests import RequestBuilder
from mllm_compile.engine.streams import Countdown
from mllm_compile.process.console import print_table
from mllm_compile.runtime.attention.captured.mixed import CapturedMixed
from mllm_compile.runtime.attention.captured.prompts import CapturedPrompts
from mllm_compile.runtime.attention.flashinfer.prefill import CapturedPrefill
from mllm_compile.runtime.attention.flashinfer_backend import FlashInferAttnBackend
from mllm_compile.runtime.attention.split.split_decode import SplitDecodeSpace
from mllm_compile.runtime.cuda_graph.mixed import MixedGraphs
from mllm_compile.runtime.cuda_graph.piece_graphs import PiecewiseGraphs
from mllm_compile.runtime.cuda_graph.prompt_slots import PromptSlots
from mllm_compile.runtime.cuda_graph.prompts import PromptGraphs
from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs
from mllm_compile.runtime.memory_pool import ReqToTokenPool
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.runner import ProgramRunner
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.step.paths.forward import ForwardPath
from mllm_compile.runtime.step.plan import Planner
from mllm_compile.runtime.step.results import StepHandle
from mllm_compile.runtime.step.runner import StepRunner
from mllm_compile.runtime.step.sampling import StepSampling

# (indent, class, method): the parts, in the order in which a prompt meets them.
PARTS: tuple[tuple[int, type, str], ...] = (
    (0, RequestBuilder, "build"),
    (0, EngineCore, "submit"),
    (0, LiveRequests, "admit"),
    (0, Scheduler, "schedule"),
    (0, StepRunner, "submit"),
    (1, Planner, "plan"),
    (1, PromptGraphs, "launch"),
    (2, PromptSlots, "write"),
    (3, CapturedPrompts, "write_prompt_work"),
    (1, ForwardPath, "_upload"),
    (2, StepInputs, "upload"),
    (1, ForwardPath, "_forward_batch"),
    (1, ModelRunner, "forward"),
    (2, CapturedMixed, "runs_well_captured"),
    (2, MixedGraphs, "replay"),
    (3, CapturedMixed, "init_forward_metadata_replay_mixed"),
    (4, SplitDecodeSpace, "list_pages"),
    (4, CapturedPrefill, "plan"),
    (3, torch.cuda.CUDAGraph, "replay"),
    (2, PiecewiseGraphs, "replay"),
    (3, FlashInferAttnBackend, "init_forward_metadata"),
    (2, ProgramRunner, "head"),
    (1, StepSampling, "follow_rows"),
    (1, Sampler, "__call__"),
    (1, ReqToTokenPool, "write_page_slots"),
    (0, Steps, "_finish"),
    (1, StepHandle, "wait"),
    (1, Scheduler, "update"),
    (1, Countdown, "on_end"),
    (1, Scheduler, "finish_update"),
)
WARM_UPS = 5
KERNELS = 16  # rows of the table


class Clock:
    """Sums the time of each part and counts its calls; notes when the first one of a call of generate began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.begins: dict[str, list[float]] = defaultdict(list)
        self._began: set[str] = set()
        self._call = Stopwatch()

    def start(self) -> None:
        """Notes that generate is called now."""
        self._began.clear()
        self._call = Stopwatch()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if name not in self._began:
                self._began.add(name)
                self.begins[name].append(self._call.seconds)
            watch = Stopwatch()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] += watch.seconds
                self.calls[name] += 1

        return timed

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()
        self.begins.clear()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt")
    parser.add_argument("--prompts", type=positive, default=1, help="prompts at once")
    parser.add_argument("--cached", type=positive, help="tokens ahead of each prompt that the prefix cache holds")
    parser.add_argument("--repeats", type=positive, default=40)
    parser.add_argument("--batched", type=positive, help="runtime.max_num_batched_tokens")
    parser.add_argument("--layers", type=positive, help="of a shape's layers only the first so many")
    graphs = parser.add_mutually_exclusive_group()
    graphs.add_argument("--piecewise", action="store_true", help="capture no whole step with prompts")
    graphs.add_argument("--whole", action="store_true", help="capture whole steps with prompts of any model")
    args = parser.parse_args()
    config = EngineConfig.from_yaml(args.config)
    runtime: dict[str, Any] = {"enable_prefix_cache": args.cached is not None}
    if args.batched is not None:
        runtime["max_num_batched_tokens"] = args.batched
    changes: dict[str, Any] = {"runtime": config.runtime.model_copy(update=runtime)}
    if args.piecewise or args.whole:
        sizes = MIXED_TOKENS if args.whole else ()
        changes["cudagraph"] = config.cudagraph.model_copy(update={"mixed_tokens": sizes})
    if args.layers is not None:
        changes["model"] = config.model.model_copy(
            update={"path": with_layers(Path(str(config.model.path)), args.layers)}
        )
    clock = Clock()
    for _, owner, method in PARTS:
        setattr(owner, method, clock.around(f"{owner.__name__}.{method}", getattr(owner, method)))
    with Engine(config.model_copy(update=changes)) as engine:
        report(engine, clock, args)


def with_layers(shape: Path, num_layers: int) -> str:
    """A copy of a shape's folder with so many layers, which lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="shape_"))
    atexit.register(shutil.rmtree, folder)
    described = json.loads((shape / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"num_hidden_layers": num_layers}))
    return str(folder)


def report(engine: Engine, clock: Clock, args: argparse.Namespace) -> None:
    """Prints the parts of `repeats` calls of one token each, and the GPU's kernels of one more."""
    draws = random.Random(0)
    params = greedy(1)
    last = min(10_000, engine.vocab_size - 1)

    def tokens(count: int) -> list[int]:
        return [draws.randint(0, last) for _ in range(count)]

    ahead = tokens(args.cached or 0)
    if ahead:
        engine.generate([ahead], params, progress=False)

    def call() -> float:
        prompts = [ahead + tokens(args.prompt) for _ in range(args.prompts)]
        clock.start()
        return wall_seconds(lambda: engine.generate(prompts, params, progress=False))

    for _ in range(WARM_UPS):
        call()
    clock.clear()
    seconds = [call() for _ in range(args.repeats)]
    middle = statistics.median(seconds)
    behind = f" behind {args.cached}" if ahead else ""
    print(
        f"{args.prompts} prompts of {args.prompt} tokens{behind}: first token after "
        f"{with_range([one * 1e3 for one in seconds], 3, ' ms')}, {args.prompts / middle:,.0f} prompts a second"
    )
    rows = [
        (
            f"{'  ' * indent}{name}",
            f"{clock.calls[name] / args.repeats:.1f}",
            f"{statistics.median(clock.begins[name]) * 1e6:.0f}",
            f"{microseconds(clock, name, args):.0f}",
        )
        for indent, name in ((indent, f"{owner.__name__}.{method}") for indent, owner, method in PARTS)
        if clock.calls[name]
    ]
    print_table(sys.stdout, "the host", ("part", "calls", "begins at, µs", "takes, of a call of generate"), rows)
    if torch.cuda.is_available():
        print_kernels(call)


def microseconds(clock: Clock, name: str, args: argparse.Namespace) -> float:
    """Mean µs of a part in one call of generate."""
    return clock.seconds[name] / args.repeats * 1e6


def print_kernels(call: Callable[[], float]) -> None:
    """Profiles one call: where the GPU's time goes, and how long it waits between kernels."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in trace.events() or []]
    launches = [name for name in names if name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch"))]
    events = device_events(trace)
    found = Occupancy.of(events)
    print(
        f"GPU, profiled: {len(events)} kernels and copies, {len(launches)} launches, {found.whole:.0f} µs from the "
        f"first to the last, idle {found.whole - found.busy:.0f} µs"
    )
    longest = "; ".join(f"{wait:.0f} {name[:40]}" for wait, name in found.longest_waits(5))
    print(f"longest waits, µs, before: {longest}")
    rows = [
        (name[:90], str(len(of_name)), f"{sum(of_name):.0f}")
        for name, of_name in list(times_by_name(events).items())[:KERNELS]
    ]
    print_table(sys.stdout, "kernels", ("kernel", "times", "µs"), rows)


if __name__ == "__main__":
    with told_in_one_line():
        main()
