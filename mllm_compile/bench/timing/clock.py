"""Times work by the wall clock, or by the GPU's own."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Seconds of the wall clock since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


def wall_seconds(work: Callable[[], object]) -> float:
    """Seconds that `work` takes its caller. A GPU may run on."""
    watch = Stopwatch()
    work()
    return watch.seconds


def cpu_seconds(work: Callable[[], object]) -> float:
    """Seconds of CPU time that all threads of this process take for `work`: what others run does not count."""
    began = time.process_time()
    work()
    return time.process_time() - began


def gpu_seconds(work: Callable[[], object]) -> float:
    """Seconds from when the stream gets to the first kernel of `work` until the last is over."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds
