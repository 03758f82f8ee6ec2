"""Times of a GPU that is made up: its clock ticks with what it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat

import pytest
import torch

from mllm_compile.bench.timing.clock import gpu_seconds
from mllm_compile.bench.timing.graph import graph_us, read_rate, replay_us


class Stream:
    """A stream of a device whose kernels take so many milliseconds each, the first three replays of a graph longer.

    Calls during a capture become the graph's, and do not run.

    Attributes:
        more_ms: what further replays take beside their kernels.
    """

    def __init__(self) -> None:
        self.now_ms = 100.0
        self.log: list[str] = []
        self.captured: list[float] | None = None
        self.more_ms: Iterator[float] = repeat(0.0)

    def launch(self, name: str, ms: float) -> None:
        if self.captured is not None:
            self.captured.append(ms)
            return
        self.log.append(name)
        self.now_ms += ms


@pytest.fixture
def stream(monkeypatch) -> Stream:
    stream = Stream()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.has_time, self.ms, self.is_over = enable_timing, 0.0, False

        def record(self) -> None:
            self.ms = stream.now_ms

        def synchronize(self) -> None:
            self.is_over = True

        def elapsed_time(self, end: Event) -> float:
            if not (self.has_time and end.has_time and end.is_over):
                raise RuntimeError("the event has no time, or not yet")
            return end.ms - self.ms

    class Graph:
        def __init__(self) -> None:
            self.kernels_ms: list[float] = []
            self.cold_replays = 3

        def replay(self) -> None:
            more_ms = 7.0 if self.cold_replays > 0 else next(stream.more_ms)
            self.cold_replays -= 1
            stream.launch(f"replay of {len(self.kernels_ms)}", sum(self.kernels_ms) + more_ms)

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        stream.captured = graph.kernels_ms
        yield
        stream.captured = None

    for name, fake in (("Event", Event), ("CUDAGraph", Graph), ("graph", capture)):
        monkeypatch.setattr(torch.cuda, name, fake)
    return stream


def test_a_graph_of_several_calls_is_timed_a_call_and_without_its_first_replays(stream):
    us = replay_us(lambda: stream.launch("kernel", 0.25), calls=4, replays=5)
    assert us == [250.0] * 5
    # Once by itself, so that nothing is loaded or compiled in a capture; then three replays that do not count.
    assert stream.log == ["kernel", *["replay of 4"] * 8]


def test_ranks_meet_ahead_of_each_replay_and_what_that_takes_is_not_counted(stream):
    us = replay_us(lambda: stream.launch("kernel", 0.5), replays=2, meet=lambda: stream.launch("meet", 3.0))
    assert us == [500.0] * 2
    assert stream.log == ["kernel", *["meet", "replay of 1"] * 5]


def test_a_graph_s_time_is_the_median_of_eleven_replays_that_agree(stream):
    stream.more_ms = iter([0.5, 0.0, 0.5, 8.0, 0.5, 0.5, 0.0, 0.5, 9.0, 0.5, 0.5])
    assert graph_us(lambda: stream.launch("kernel", 0.125)) == 625.0
    assert stream.log == ["kernel", *["replay of 1"] * 14]


def test_a_graph_whose_replays_do_not_agree_is_replayed_more_often(stream):
    stream.more_ms = iter([4.0] * 6 + [0.5] * 60)
    assert graph_us(lambda: stream.launch("kernel", 0.125)) == 625.0
    assert 14 < stream.log.count("replay of 1") < 30


def test_launches_are_timed_from_the_first_kernel_to_the_last(stream):
    def work() -> None:
        stream.launch("first", 1.0)
        stream.launch("last", 2.0)

    stream.launch("ahead", 9.0)
    assert gpu_seconds(work) == pytest.approx(0.003)


def test_the_rate_of_reading_is_measured_by_a_gigabyte_s_sum(stream, monkeypatch):
    class Gigabyte:
        nbytes = 1 << 30

        def sum(self) -> None:
            stream.launch("sum", 0.5)

    monkeypatch.setattr(torch, "ones", lambda count, device: {(1 << 28, "cuda"): Gigabyte()}[count, device])
    assert read_rate() == pytest.approx(2147.5, abs=0.1)
