"""Shows the progress of long work: stages with a name, an optional count, and seconds.

The compiler and the loader get a `Reporter`. `reporter_for(stream)` picks the one that fits: bars on a
terminal, plain lines for the command line elsewhere, the log "mllm_compile.progress" for a library call elsewhere. Bars
and lines are for long stages; the rest is shown only with details.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

logger = logging.getLogger("mllm_compile.progress")

# Seconds between lines of a stage that is not over.
_LINE_INTERVAL_S = 5.0
# A bar of a stage that is over before this would only flicker. Longer than `import torch` usually takes: to import
# rich beside it would slow every start.
_BAR_AFTER_S = 2.0


class Stage(Protocol):
    """The running stage; `advance` counts towards the total it was opened with."""

    def advance(self, count: int = 1) -> None: ...


class Reporter(Protocol):
    """The place for stages, remarks and tables of long work.

    `with reporter.stage("load weights", total=num_bytes) as stage: stage.advance(read)`. Stages may be inside each
    other. A stage that ends by an exception is not reported as done.
    """

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]: ...

    def note(self, text: str) -> None:
        """Notes a detail."""

    def tell(self, text: str) -> None:
        """Tells a line that is shown also without details: that it is ready."""
        self.note(text)

    def announce(self, text: str) -> None:
        """Like tell, and a warning where it is logged: why it takes long, or what was left out."""
        self.tell(text)

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

    tell = announce = note

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
def _lines_of_stage(name: str, total: int | None, say: Callable[[str], None], least_s: float = 0.0) -> Iterator[Stage]:
    """Logs a line when the stage is over, unless it took less than `least_s`, and during it if it counts."""
    start = time.perf_counter()
    yield _LineStage(name, total, say)
    seconds = time.perf_counter() - start
    if seconds >= least_s:
        say(f"{name}: {seconds:.2f} s")


class PlainReporter:
    """Writes lines for log files and pipes: every few seconds of a stage that counts, and at its end.

    Args:
        details: also notes and tables, and a line for each stage however short it is.
    """

    def __init__(self, stream: TextIO, *, details: bool = False) -> None:
        self._stream = stream
        self._details = details

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        return _lines_of_stage(name, total, self.tell, 0.0 if self._details else _LINE_INTERVAL_S)

    def note(self, text: str) -> None:
        if self._details:
            self.tell(text)

    def tell(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    announce = tell

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self._details:
            from mllm_compile.process.console import print_table

            print_table(self._stream, title, columns, rows)


class LogReporter:
    """The same lines as log records of level INFO; what is announced is a WARNING, which Python shows by itself."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        return _lines_of_stage(name, total, self.note)

    def note(self, text: str) -> None:
        logger.info("%s", text)

    tell = note

    def announce(self, text: str) -> None:
        logger.warning("%s", text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from mllm_compile.process.console import print_table

        text = io.StringIO()
        print_table(text, title, columns, rows)
        self.note(text.getvalue().rstrip())


class _RichStage:
    """Counts from any thread; has a bar while its reporter shows any."""

    def __init__(self, name: str, total: int | None, lock: threading.RLock) -> None:
        self._name = name
        self._total = total
        self._lock = lock
        self._done = 0
        self._bar: tuple[Progress, TaskID] | None = None

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            if self._bar is not None:
                progress, task = self._bar
                progress.update(task, completed=self._done)

    def show(self, progress: Progress) -> None:
        self._bar = (progress, progress.add_task(self._name, total=self._total, completed=self._done))

    def hide(self) -> None:
        if self._bar is not None:
            progress, task = self._bar
            progress.remove_task(task)
            self._bar = None


class RichReporter:
    """Shows live bars of stages that take long, which leave nothing behind.

    The live display exists only inside a stage, so that whatever is printed between stages (streamed text) is safe.

    Args:
        details: also notes and tables, bars at once, and a line with seconds for each outermost stage.
    """

    def __init__(self, stream: TextIO, *, details: bool = False) -> None:
        self._stream = stream
        self._details = details
        self._lock = threading.RLock()  # what is below, and the stages' bars
        self._stages: list[_RichStage] = []
        self._progress: Progress | None = None
        self._timer: threading.Timer | None = None

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        stage = _RichStage(name, total, self._lock)
        start = time.perf_counter()
        is_outermost = self._begin(stage)
        try:
            yield stage
            if is_outermost and self._details:
                console = self._console if self._progress is None else self._progress.console
                console.print(f"[green]✓[/green] {name}  [dim]{time.perf_counter() - start:.2f} s[/dim]")
        finally:
            self._end(stage)

    def note(self, text: str) -> None:
        if self._details:
            self.tell(text)

    def tell(self, text: str) -> None:
        with self._lock:
            if self._progress is None:
                print(text, file=self._stream, flush=True)
            else:
                self._progress.console.print(text, markup=False, highlight=False)

    announce = tell

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self._details:
            from mllm_compile.process.console import print_table

            print_table(self._stream, title, columns, rows)

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(file=self._stream, highlight=False)

    def _begin(self, stage: _RichStage) -> bool:
        """Adds `stage`; True if it is the outermost one."""
        with self._lock:
            self._stages.append(stage)
            if self._progress is not None:
                stage.show(self._progress)
            elif len(self._stages) == 1:
                if self._details:
                    self._show()
                else:
                    self._timer = threading.Timer(_BAR_AFTER_S, self._show)
                    self._timer.daemon = True
                    self._timer.start()
            return len(self._stages) == 1

    def _end(self, stage: _RichStage) -> None:
        with self._lock:
            self._stages.remove(stage)
            stage.hide()
            if self._stages:
                return
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def _show(self) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if not self._stages or self._progress is not None:  # over while the timer's thread came here
                return
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            for stage in self._stages:
                stage.show(self._progress)
            self._progress.start()


def reporter_for(stream: TextIO | None = None, *, plain_lines: bool = False, details: bool = False) -> Reporter:
    """The reporter that fits a stream.

    Args:
        stream: where to write; None is stderr, which keeps stdout for results.
        plain_lines: off a terminal, write lines (the command line does) rather than log them (a library).
        details: also shows the value of every setting, and every stage with its seconds. The log always has them.
    """
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        return RichReporter(stream, details=details)
    return PlainReporter(stream, details=details) if plain_lines else LogReporter()
