"""How a GPU's work fills the time, from made-up events."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mllm_compile.bench.trace.device_events import DeviceEvent, Occupancy, device_events, times_by_name

EVENTS = [
    DeviceEvent(10, 20, "gemm"),
    DeviceEvent(15, 18, "copy"),  # beside it
    DeviceEvent(25, 30, "norm"),
    DeviceEvent(30, 42, "gemm"),
    DeviceEvent(43, 50, "norm"),
]


def test_time_in_which_something_runs_counts_once():
    found = Occupancy.of(EVENTS)
    assert (found.whole, found.busy) == (40, 34)
    assert found.longest_waits(2) == [(5.0, "norm"), (1.0, "norm")]


def test_times_are_by_name_the_most_first():
    assert list(times_by_name(EVENTS).items()) == [("gemm", [10, 12]), ("norm", [5, 7]), ("copy", [3])]


def test_events_of_the_host_are_left_out_and_the_others_in_order():
    kinds = torch.autograd.DeviceType
    events = [(kinds.CUDA, 3, 4, "b"), (kinds.CPU, 0, 9, "aten::mm"), (kinds.CUDA, 1, 2, "a")]
    trace = SimpleNamespace(
        events=lambda: [
            SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=start, end=end), name=name)
            for kind, start, end, name in events
        ]
    )
    assert device_events(trace) == [(1, 2, "a"), (3, 4, "b")]
