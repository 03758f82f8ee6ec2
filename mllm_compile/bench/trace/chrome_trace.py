"""Reads torch.profiler's trace: which kernels each step launched, for how long, and from which part of the program.

The file format is Chrome's (`export_chrome_trace`), which has stayed the same over many versions of torch, unlike the
profiler's own objects. A kernel belongs to the part of the program whose range held the call that launched it; its own
time is elsewhere, on the GPU. On a CPU the operators take the kernels' place, each with its own time only. A library of
ours is no operator: its layer's range has its time.

Pure Python; times are microseconds.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STEP_RANGE = "mllm step"
PIECE_RANGE = "mllm piece "  # and the index of the call in the program
LAYER_RANGE = "mllm layer "  # likewise, of attention or a layer with a state
BEFORE_FIRST_PIECE = -1

_KERNEL_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
COMPILED_LOOPS, OWN_LIBRARY = "(compiled loops)", "(own library)"


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """One kernel of a step, or on a CPU one operator.

    Attributes:
        name: as the profiler gives it.
        start_us: when it began, within its step.
        us: how long it took.
        piece: index of the piece call that launched it, or of the last one before it; BEFORE_FIRST_PIECE for none.
        inside: launched by that piece, not after it.
    """

    name: str
    start_us: float
    us: float
    piece: int
    inside: bool


def read_steps(trace: Mapping[str, Any], on_gpu: bool) -> list[list[TracedKernel]]:
    """The kernels of every step, in the order in which they ran."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sorted((_span(event) for event in ranges if event["name"] == STEP_RANGE), key=lambda span: span[0])
    pieces = _Pieces(ranges)
    found = _gpu_kernels(events, pieces) if on_gpu else _cpu_operators(events, pieces)
    starts = [start for start, _ in steps]
    by_step: list[list[TracedKernel]] = [[] for _ in steps]
    for launched_us, kernel in found:
        index = bisect_right(starts, launched_us) - 1
        if index >= 0 and launched_us <= steps[index][1]:
            begin = steps[index][0]
            placed = TracedKernel(kernel.name, kernel.start_us - begin, kernel.us, kernel.piece, kernel.inside)
            by_step[index].append(placed)
    for kernels in by_step:
        kernels.sort(key=lambda kernel: kernel.start_us)
        _forget_other_steps(kernels)
    return by_step


def short_name(kernel: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    if kernel.startswith(("(", "aten::")):
        return kernel
    if kernel.startswith(("Memcpy", "Memset")):
        return kernel.split(" (")[0]
    name = kernel.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    words = name.split("(")[0].split()
    return words[-1].split("::")[-1] if words else kernel


class _Pieces:
    """The ranges of piece calls, searched by time."""

    def __init__(self, ranges: Iterable[Mapping[str, Any]]) -> None:
        found = sorted(
            (*_span(event), int(event["name"].removeprefix(PIECE_RANGE)))
            for event in ranges
            if event["name"].startswith(PIECE_RANGE)
        )
        self._starts = [start for start, _, _ in found]
        self._found = found

    def at(self, us: float) -> tuple[int, bool]:
        """(index of the piece call, whether the time is inside it)."""
        index = bisect_right(self._starts, us) - 1
        if index < 0:
            return BEFORE_FIRST_PIECE, False
        _, end, piece = self._found[index]
        return piece, us <= end


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _gpu_kernels(events: list[Mapping[str, Any]], pieces: _Pieces) -> list[tuple[float, TracedKernel]]:
    """(when it was launched, kernel): kernels of a graph carry the correlation of the graph's launch.

    A kernel that starts before the one ahead of it in its stream has ended waits for that: its time counts from there.
    """
    launches = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCH_KINDS and "correlation" in event.get("args", {})
    }
    found = []
    ends: dict[Any, float] = {}  # by stream
    for event in sorted((event for event in events if event.get("cat") in _KERNEL_KINDS), key=_span):
        start, end = _span(event)
        args = event.get("args", {})
        launched = launches.get(args.get("correlation"), start)
        ahead = ends.get(args.get("stream"), start)
        begin = min(end, max(start, ahead))
        ends[args.get("stream")] = max(end, ahead)
        found.append((launched, TracedKernel(event["name"], begin, end - begin, *pieces.at(launched))))
    return found


def _cpu_operators(events: list[Mapping[str, Any]], pieces: _Pieces) -> list[tuple[float, TracedKernel]]:
    """Operators with their own time; what a piece spends outside of them is in its compiled loops, and what a layer
    does is in a library of ours."""
    wanted = [
        event
        for event in events
        if event.get("cat") == "cpu_op"
        or (event.get("cat") == "user_annotation" and event["name"].startswith((PIECE_RANGE, LAYER_RANGE)))
    ]
    found = []
    for event, own_us in _own_times(wanted):
        start, name = float(event["ts"]), event["name"]
        if event["cat"] != "cpu_op":
            name = COMPILED_LOOPS if name.startswith(PIECE_RANGE) else OWN_LIBRARY
        found.append((start, TracedKernel(name, start, own_us, *pieces.at(start))))
    return found


def _own_times(events: list[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], float]]:
    """(event, its time without the events inside it), thread by thread."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        by_thread.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for thread in by_thread.values():
        own = {id(event): float(event.get("dur", 0.0)) for event in thread}
        open_events: list[Mapping[str, Any]] = []
        for event in sorted(thread, key=lambda event: (float(event["ts"]), -float(event.get("dur", 0.0)))):
            while open_events and _span(open_events[-1])[1] <= float(event["ts"]):
                open_events.pop()
            if open_events:
                own[id(open_events[-1])] -= float(event.get("dur", 0.0))
            open_events.append(event)
        yield from ((event, max(0.0, own[id(event)])) for event in thread)


def _forget_other_steps(kernels: list[TracedKernel]) -> None:
    """Moves kernels before a step's first piece out of 'after the last piece' of the step before."""
    for index, kernel in enumerate(kernels):
        if kernel.inside:
            return
        kernels[index] = TracedKernel(kernel.name, kernel.start_us, kernel.us, BEFORE_FIRST_PIECE, False)
