"""Tells the kernels of a step by a profiler: those of a longer run that a shorter one has not."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from mllm_compile.bench.trace.chrome_trace import short_name
from mllm_compile.bench.trace.device_events import device_events, times_by_name


def tell_kernels(run: Callable[[int], object], few: int, steps: int, most: int) -> None:
    """Prints launches a step, µs of a launch and of a step, and the quartiles of a launch.

    A kernel that begins early waits in its own time, so the sum may be more than the step.

    Args:
        run: does so many steps on a GPU, and waits for them.
        few: steps of the shorter run.
        steps: that the longer one has more.
        most: number of kernels that are told, by their time.
    """
    traced = []
    for count in (few, few + steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            run(count)
        traced.append(times_by_name(device_events(trace)))
    shorter, longer = traced
    rows = []
    for name, times in longer.items():
        before = shorter.get(name, [])
        launches, micros = (len(times) - len(before)) / steps, (sum(times) - sum(before)) / steps
        if launches > 0 and len(times) > 1:
            low, _, high = statistics.quantiles(times, n=4)
            rows.append((micros, launches, low, high, short_name(name)))
    for micros, launches, low, high, name in sorted(rows, reverse=True)[:most]:
        each = micros / launches
        print(f"  {micros:7.1f} us: {launches:5.1f} x {each:6.2f} ({low:.2f} to {high:.2f})  {name}")
