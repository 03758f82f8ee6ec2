"""How long work shows where it is: stages with a name, an optional count, and seconds.

`Reporter` is what the compiler and the loader are handed. `reporter_for(stream)` picks the one that fits: bars on a
terminal, plain lines for the command line elsewhere, nothing for a library call elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        pass


class PlainReporter:
    """One line when a stage is over: for log files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        start = time.perf_counter()
        yield _Uncounted()
        self.note(f"{name}: {time.perf_counter() - start:.2f} s")

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from mllm_compile.console import print_table

        print_table(self._stream, title, columns, rows)


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

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from mllm_compile.console import print_table

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
        plain_lines: off a terminal, write a line a stage (the command line does) rather than nothing (a library).
    """
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        return RichReporter(stream)
    return PlainReporter(stream) if plain_lines else NullReporter()
