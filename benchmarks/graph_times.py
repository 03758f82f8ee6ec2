"""How scripts time what runs on a GPU, by the GPU's own clock: replays of a CUDA graph, or launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UPS, REPLAYS = 3, 11


def timed_us(run: Callable[[], object], times: int, meet: Callable[[], object] = lambda: None) -> list[float]:
    """Microseconds of each of so many runs: from when the stream gets to the first kernel until the last is over.

    `meet` is called ahead of each: ranks wait there for each other.
    """
    found = []
    for _ in range(times):
        meet()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return found


def replay_us(
    run: Callable[[], object], calls: int = 1, replays: int = REPLAYS, meet: Callable[[], object] = lambda: None
) -> list[float]:
    """Microseconds of one call of `run`, a number a replay, of a graph that calls it `calls` times: with nothing of the
    host's. `meet` as timed_us has it."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return [us / calls for us in timed_us(graph.replay, WARM_UPS + replays, meet)[WARM_UPS:]]


def graph_us(
    run: Callable[[], object], calls: int = 1, replays: int = REPLAYS, meet: Callable[[], object] = lambda: None
) -> float:
    """The median of `replay_us`."""
    return statistics.median(replay_us(run, calls, replays, meet))


def read_rate() -> float:
    """GB/s at which a sum over a gigabyte reads."""
    data = torch.ones(1 << 28, device="cuda")
    return data.nbytes / graph_us(data.sum) / 1e3
