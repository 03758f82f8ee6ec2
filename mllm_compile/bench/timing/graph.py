"""Times the work of a CUDA graph by the GPU's own clock, without the host's time."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from mllm_compile.bench.timing.clock import gpu_seconds
from mllm_compile.bench.timing.rounds import repeated, until_stable

WARM_UPS, REPLAYS = 3, 11
_MOST = 5  # times as many replays, where they do not agree


def replay_us(
    run: Callable[[], object], calls: int = 1, replays: int = REPLAYS, meet: Callable[[], object] | None = None
) -> list[float]:
    """Microseconds of one call of `run`, a number a replay, of a graph that calls it `calls` times.

    Args:
        meet: called ahead of each replay: ranks wait there for each other.
    """
    replay = _captured(run, calls)

    def take() -> float:
        if meet is not None:
            meet()
        return gpu_seconds(replay) * 1e6 / calls

    return repeated(take, replays, WARM_UPS)


def graph_us(run: Callable[[], object], calls: int = 1, replays: int = REPLAYS) -> float:
    """The median microseconds of one call of `run`, as replay_us has it.

    Args:
        replays: at least so many, and more until they agree. Ranks that wait for each other take replay_us.
    """
    replay = _captured(run, calls)
    repeated(lambda: gpu_seconds(replay), 0, WARM_UPS)
    times = until_stable(lambda: gpu_seconds(replay) * 1e6, replays, _MOST * replays)
    return statistics.median(times) / calls


def read_rate() -> float:
    """GB/s at which a sum over a gigabyte reads."""
    data = torch.ones(1 << 28, device="cuda")
    return data.nbytes / graph_us(data.sum) / 1e3


def _captured(run: Callable[[], object], calls: int) -> Callable[[], object]:
    """Replays so many calls. The first call is outside: what is loaded or compiled once cannot be captured."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay
