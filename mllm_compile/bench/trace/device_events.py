"""Reads a profiler's trace of a GPU: kernels and copies, how long it was busy, and its waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class DeviceEvent(NamedTuple):
    """A kernel or a copy, in µs."""

    start: float
    end: float
    name: str


def device_events(trace: torch.profiler.profile) -> list[DeviceEvent]:
    """All that ran on the GPU, by start."""
    on_device = torch.autograd.DeviceType.CUDA
    found = (event for event in trace.events() or [] if event.device_type == on_device)
    return sorted(DeviceEvent(one.time_range.start, one.time_range.end, one.name) for one in found)


@dataclass
class Occupancy:
    """How events fill the time from the first one's start to the last one's end, in µs.

    Attributes:
        whole, busy: all of that time, and the part in which something ran.
        waits: before each event, with its name.
    """

    whole: float
    busy: float
    waits: list[tuple[float, str]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[DeviceEvent]) -> Occupancy:
        until, waits = events[0].start, []
        for event in events:
            waits.append((max(0.0, event.start - until), event.name))
            until = max(until, event.end)
        whole = until - events[0].start
        return cls(whole, whole - sum(wait for wait, _ in waits), waits)

    def longest_waits(self, count: int) -> list[tuple[float, str]]:
        """The longest first."""
        return sorted(self.waits, reverse=True)[:count]


def times_by_name(events: Iterable[DeviceEvent]) -> dict[str, list[float]]:
    """The µs of each event by its name, the names of most time first."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.end - event.start)
    return dict(sorted(times.items(), key=lambda item: -sum(item[1])))
