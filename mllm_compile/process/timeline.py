"""Records where the time of a start goes: stages with begin and end, counted from the process's first moment.

A Timeline is a Reporter around another one: it times the stages that are reported.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from mllm_compile.process.progress import NullReporter, Reporter, Stage

_BAR_WIDTH = 50
_GAP_S = 0.05  # what no stage accounts for is a line of its own from here on


@dataclass(frozen=True)
class Span:
    """One stage; seconds since the process began. `depth` 1 and more: inside another stage or beside it."""

    name: str
    start_s: float
    end_s: float
    depth: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Timeline:
    """Times every stage and passes it on. Stages may run in several threads at once."""

    def __init__(self, reporter: Reporter | None = None) -> None:
        self._reporter = reporter or NullReporter()
        self._nesting = threading.local()
        self._spans: list[Span] = []
        self._made_s = seconds_since_start()

    @property
    def age_s(self) -> float:
        """Seconds since it was made. The process may be older than what it does: a shell that ends in a command becomes
        it."""
        return seconds_since_start() - self._made_s

    @property
    def spans(self) -> list[Span]:
        """The spans in the order of their beginning."""
        return sorted(self._spans, key=lambda span: (span.start_s, -span.end_s))

    @property
    def stages(self) -> list[tuple[str, float]]:
        """(name, seconds) of the outermost ones, in the order of their beginning."""
        return [(span.name, span.seconds) for span in self.spans if span.depth == 0]

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        is_beside = threading.current_thread() is not threading.main_thread()
        depth = getattr(self._nesting, "depth", int(is_beside))
        self._nesting.depth = depth + 1
        start = seconds_since_start()
        try:
            with self._reporter.stage(name, total) as stage:
                yield stage
            self._spans.append(Span(name, start, seconds_since_start(), depth))
        finally:
            self._nesting.depth = depth

    def add(self, name: str, start_s: float, end_s: float, depth: int = 0) -> None:
        """Adds a stage that was over before it could be timed, or that another process has timed."""
        self._spans.append(Span(name, start_s, end_s, depth))

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def tell(self, text: str) -> None:
        getattr(self._reporter, "tell", self._reporter.note)(text)  # a caller's own may have no such method

    def announce(self, text: str) -> None:
        getattr(self._reporter, "announce", self._reporter.note)(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._reporter.table(title, columns, rows)


def timeline_of(reporter: Reporter | None) -> Timeline:
    """The reporter itself when it is a timeline, else one around it."""
    return reporter if isinstance(reporter, Timeline) else Timeline(reporter)


def with_gaps(spans: Sequence[Span]) -> list[Span]:
    """The outermost stages, their inner ones, and a line for each stretch that none accounts for."""
    lines: list[Span] = []
    now = 0.0
    for span in spans:
        if span.depth == 0:
            if span.start_s - now > _GAP_S:
                lines.append(Span("(between stages)", now, span.start_s))
            now = max(now, span.end_s)
        lines.append(span)
    return lines


def print_timeline(stream: TextIO, spans: Sequence[Span]) -> None:
    """Prints a line a stage: when it began, how long it took, a bar to scale."""
    from mllm_compile.process.console import print_table

    lines = with_gaps(spans)
    total = max((span.end_s for span in lines), default=0.0)
    rows = [
        (f"{span.start_s:.2f}", f"{span.seconds:.2f}", "  " * span.depth + span.name, _bar(span, total))
        for span in lines
    ]
    print_table(stream, f"{total:.2f} s since the process began", ("at s", "takes s", "stage", ""), rows)


def _bar(span: Span, total_s: float) -> str:
    scale = _BAR_WIDTH / total_s if total_s else 0.0
    start = int(span.start_s * scale)
    return " " * start + "█" * max(1, round(span.end_s * scale) - start)


def seconds_since_start() -> float:
    """Since the process began, by the kernel's clock (it ticks every 10 ms)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process_start()


def process_start() -> float:
    """Seconds between the machine's boot and this process's begin, by which spans of two processes are compared."""
    global _started
    if _started is None:
        try:
            with open("/proc/self/stat", encoding="utf-8") as file:
                fields = file.read().rpartition(")")[2].split()
            _started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):  # no /proc
            _started = time.clock_gettime(time.CLOCK_BOOTTIME)
    return _started


_started: float | None = None
