"""How long work shows where it is: stages with a name, an optional count, and seconds.

`Reporter` is what the compiler and the loader are handed. `reporter_for(stream)` picks the one that fits: bars on a
terminal, plain lines for the command line elsewhere, the log "mllm_compile.progress" for a library call elsewhere.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger("mllm_compile.progress")

# A line of a stage that is not over: as often as somebody who waits for the next one wants it.
_LINE_INTERVAL_S = 5.0


class Stage(Protocol):
    """The running stage; `advance` counts towards the total it was opened with."""

    def advance(self, count: int = 1) -> None: ...


class Reporter(Protocol):
    """Where stages, remarks and tables of long work go.

    `with reporter.stage("load weights", total=num_bytes) as stage: stage.advance(read)`. Stages may lie inside each
    other. A stage that ends by an exception is not reported as done.
    """

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]: ...

    def note(self, text: str) -> None: ...

    def announce(self, text: str) -> None:
        """A note that is also for whoever sees no stages: why it will be long, what is not done."""
        self.note(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...


class _Uncounted:
    def advance(self, count: int = 1) -> None:
        pass


class NullReporter:
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        yield _Uncounted()

    def note(self, text: str) -> None:
        pass

    def announce(self, text: str) -> None:
        self.note(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        pass


class _LineStage:
    """Says now and then how much of its total is done; counts from any thread."""

    def __init__(self, name: str, total: int | None, say: Callable[[str], None]) -> None:
        self._name = name
        self._total = total
        self._say = say
        self._done = 0
        self._start = self._said = time.perf_counter()
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            now = time.perf_counter()
            if self._total is None or self._done >= self._total or now - self._said < _LINE_INTERVAL_S:
                return
            self._said = now
            share = 100 * self._done // self._total
        self._say(f"{self._name}: {share} % after {now - self._start:.1f} s")


@contextmanager
def _lines_of_stage(name: str, total: int | None, say: Callable[[str], None]) -> Iterator[Stage]:
    """A line when it is over, and while it lasts where it counts."""
    start = time.perf_counter()
    yield _LineStage(name, total, say)
    say(f"{name}: {time.perf_counter() - start:.2f} s")


class PlainReporter:
    """One line when a stage is over, and every few seconds of one that counts: for log files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        return _lines_of_stage(name, total, self.note)

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def announce(self, text: str) -> None:
        self.note(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from mllm_compile.process.console import print_table

        print_table(self._stream, title, columns, rows)


class LogReporter:
    """The same lines as log records of level INFO; what is announced is a WARNING, which Python shows by itself."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        return _lines_of_stage(name, total, self.note)

    def note(self, text: str) -> None:
        logger.info("%s", text)

    def announce(self, text: str) -> None:
        logger.warning("%s", text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from mllm_compile.process.console import print_table

        text = io.StringIO()
        print_table(text, title, columns, rows)
        self.note(text.getvalue().rstrip())


class _RichStage:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)


class RichReporter:
    """Live bars while stages run; when the outermost stage ends they give way to a line with its seconds.

    The live display exists only inside a stage, so that whatever is printed between stages (streamed text) is safe.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._progress: Progress | None = None

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        outermost = self._progress is None
        progress = self._progress or self._start()
        task = progress.add_task(name, total=total)
        start = time.perf_counter()
        try:
            yield _RichStage(progress, task)
            if outermost:
                progress.console.print(f"[green]✓[/green] {name}  [dim]{time.perf_counter() - start:.2f} s[/dim]")
        finally:
            progress.remove_task(task)
            if outermost:
                progress.stop()
                self._progress = None

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def announce(self, text: str) -> None:
        self.note(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from mllm_compile.process.console import print_table

        print_table(self._stream, title, columns, rows)

    def _start(self) -> Progress:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        return self._progress


def reporter_for(stream: TextIO | None = None, *, plain_lines: bool = False) -> Reporter:
    """The reporter that fits a stream.

    Args:
        stream: where to write; None is stderr, which keeps stdout for results.
        plain_lines: off a terminal, write a line a stage (the command line does) rather than log it (a library).
    """
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        return RichReporter(stream)
    return PlainReporter(stream) if plain_lines else LogReporter()
