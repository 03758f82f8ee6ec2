"""Where the time of captured verify steps goes: idle time between steps, a layer's period and kernels, the GPU's clock.

    python -m benchmarks.steps.verify_parts CONFIG [--requests 32] [--drafted 3] [--prompt 512] [--new 160]

Needs an NVIDIA GPU. An engine with n-grams and an engine without drafts come one after the other. A step is from one
kernel that makes its inputs to the next; those of the middle of an answer count, in which no request ends. A layer is
from one attention to the next; each of its kernels is shown with its start and end behind the layer's. A kernel that
begins early waits within its time. So what it adds is shown too: its time behind the end of all before it. These add up
to the step's busy time, and are told by name as well. The clock is read while steps run unprofiled, as products of many
rows may draw so much that it falls; a step's time is told of these too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.script import greedy, need_gpu, parser_of, positive, told_in_one_line
from benchmarks.steps.verify_speed import config_of, pace_of
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.gpu_meter import GpuMeter, Nvml
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.bench.trace.device_events import DeviceEvent, Occupancy, device_events

BEGINS = "_begin_kernel"  # of captured decodes and verify steps
STEPS = 12  # of the middle: every request decodes in each
NAMES = 14


def is_attention(event: DeviceEvent) -> bool:
    return any(name in event.name for name in ("cluster_decode", "share_decode", "split_decode", "ordered_decode"))


def parts_between(events: Sequence[DeviceEvent], is_first: Callable[[DeviceEvent], bool]) -> list[list[DeviceEvent]]:
    """The events from each first one up to the next; what is ahead of all or behind the last is left out."""
    places = [place for place, event in enumerate(events) if is_first(event)]
    return [list(events[begin:end]) for begin, end in pairwise(places)]


def behind_others(events: Sequence[DeviceEvent]) -> list[float]:
    """µs of each event behind the end of all before it: they add up to the time in which something ran."""
    until, found = events[0].start, []
    for event in events:
        found.append(max(0.0, event.end - max(until, event.start)))
        until = max(until, event.end)
    return found


def report(events: Sequence[DeviceEvent]) -> list[str]:
    """Lines on steps of the middle."""
    steps = parts_between(events, lambda event: event.name.startswith(BEGINS))
    if len(steps) < 2:
        return ["fewer than two captured steps"]
    first = max(0, (len(steps) - STEPS) // 2)
    steps = steps[first : first + STEPS]
    chosen = [event for step in steps for event in step]
    of_all = Occupancy.of(chosen)
    period = statistics.median(after[0].start - before[0].start for before, after in pairwise(steps))
    idle = (of_all.whole - of_all.busy) / len(steps)
    gaps = ", ".join(f"{wait:.0f} before {name[:32]}" for wait, name in of_all.longest_waits(3))
    lines = [f"a step every {period:.0f} µs, the GPU idle for {idle:.0f}; longest: {gaps}"]
    layers = [layer for step in steps for layer in parts_between(step, is_attention)]
    usual = statistics.mode(tuple(event.name for event in layer) for layer in layers) if layers else ()
    alike = [layer for layer in layers if tuple(event.name for event in layer) == usual]
    for place, name in enumerate(usual):
        start, end = (
            statistics.median(getattr(layer[place], edge) - layer[0].start for layer in alike)
            for edge in ("start", "end")
        )
        lines.append(f"  {start:8.1f} to {end:8.1f}  {name[:80]}")
    names: dict[str, list[float]] = defaultdict(list)
    for event, added in zip(chosen, behind_others(chosen), strict=True):
        names[event.name].append(added)
    for name, added in sorted(names.items(), key=lambda item: -sum(item[1]))[:NAMES]:
        lines.append(f"  {sum(added) / len(steps):8.1f} µs a step by {len(added) / len(steps):5.1f} x  {name[:80]}")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument("--drafted", type=positive, default=3)
    parser.add_argument("--prompt", type=positive, default=512)
    parser.add_argument("--new", type=positive, default=160)
    args = parser.parse_args()
    need_gpu()
    config, nvml = EngineConfig.from_yaml(args.config), Nvml.of("cuda")
    sizes = {"decode_requests": (args.requests,), "piecewise_tokens": (512,), "mixed_tokens": ()}
    config = config.model_copy(update={"cudagraph": config.cudagraph.model_copy(update=sizes)})
    generator, meter = torch.Generator().manual_seed(0), GpuMeter(nvml)
    prompts = torch.randint(100, 1000, (args.requests, args.prompt), generator=generator).tolist()
    print(machine_line())
    for drafted in (args.drafted, 0):
        most_tokens = args.prompt + args.new + 64
        with Engine(config_of(config, drafted, 1 + drafted / 2, args.requests, most_tokens)) as engine:
            engine.generate(prompts, greedy(16))
            with meter.watching() as span:
                pace = pace_of(engine, prompts, args.new)
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                engine.generate(prompts, greedy(args.new))
                torch.cuda.synchronize()
        state = meter.state([span])
        clock = state or "no readings of the clock: pip install nvidia-ml-py"
        print(f"{drafted} drafted: {pace.step_ms:.3f} ms a step unprofiled, {clock}")
        print("\n".join(report(device_events(trace))))


if __name__ == "__main__":
    with told_in_one_line():
        main()
