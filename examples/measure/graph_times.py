"""How scripts of this folder time what runs on a GPU: by replays of a CUDA graph of it, with nothing of the host's."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UPS, REPLAYS = 3, 11


def replay_us(
    run: Callable[[], object], calls: int = 1, replays: int = REPLAYS, meet: Callable[[], object] = lambda: None
) -> list[float]:
    """Microseconds of one call of `run`, a number a replay, of a graph that calls it `calls` times.

    `meet` is called ahead of each replay: ranks wait there for each other.
    """
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(WARM_UPS + replays):
        meet()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return times[WARM_UPS:]


def graph_us(
    run: Callable[[], object], calls: int = 1, replays: int = REPLAYS, meet: Callable[[], object] = lambda: None
) -> float:
    """The median of `replay_us`."""
    return statistics.median(replay_us(run, calls, replays, meet))


def read_rate() -> float:
    """GB/s at which a sum over a gigabyte reads."""
    data = torch.ones(1 << 28, device="cuda")
    return data.nbytes / graph_us(data.sum) / 1e3
