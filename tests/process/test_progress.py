"""Reporters: what a terminal, a pipe and a library call see of long work."""

from __future__ import annotations

import io
import logging
import re
from types import SimpleNamespace

import pytest

from mllm_compile.process import progress
from mllm_compile.process.progress import LogReporter, NullReporter, PlainReporter, RichReporter, reporter_for
from mllm_compile.process.timeline import Timeline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_reporter_fits_the_stream():
    assert isinstance(reporter_for(Terminal()), RichReporter)
    assert isinstance(reporter_for(io.StringIO(), plain_lines=True), PlainReporter)
    assert isinstance(reporter_for(io.StringIO()), LogReporter)


def test_a_pipe_gets_a_line_a_stage():
    stream = io.StringIO()
    reporter = PlainReporter(stream, details=True)
    with reporter.stage("load", total=10) as stage:
        stage.advance(10)
    reporter.note("done [1]")
    reporter.table("sizes", ("name", "bytes"), [("weights", "10"), ("kv", "7")])
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("load: 0.")
    assert lines[1:] == ["done [1]", "sizes", "  name     bytes", "  weights     10", "  kv           7"]


def test_a_library_call_off_a_terminal_is_in_the_log_and_what_is_announced_a_warning(caplog):
    reporter = Timeline(LogReporter())
    with caplog.at_level(logging.INFO, logger="mllm_compile"):
        reporter.announce("compiling a")
        with reporter.stage("compile pieces", total=3) as stage:
            stage.advance()
        reporter.note("100 % done")
        reporter.table("sizes", ("name", "bytes"), [("kv", "7")])
    assert {record.name for record in caplog.records} == {"mllm_compile.progress"}
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[0] == ("WARNING", "compiling a")
    assert re.fullmatch(r"compile pieces: 0\.\d\d s", said[1][1])
    assert said[2:] == [("INFO", "100 % done"), ("INFO", "sizes\n  name  bytes\n  kv        7")]
    assert said[1][0] == "INFO"


def test_a_pipe_gets_lines_while_a_long_stage_counts(monkeypatch):
    stream = io.StringIO()
    reporter = PlainReporter(stream, details=True)
    with reporter.stage("compile pieces", total=4) as stage:
        stage.advance()  # too early to be told
        monkeypatch.setattr(progress, "_LINE_INTERVAL_S", 0.0)
        stage.advance(2)
        stage.advance()  # told by the stage's end
    with reporter.stage("uncounted") as stage:
        stage.advance()
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"compile pieces: 75 % after 0\.\d s", lines[0])
    assert [line.partition(": 0.")[0] for line in lines[1:]] == ["compile pieces", "uncounted"]


def test_what_is_announced_is_a_line_where_lines_are_seen():
    for stream, reporter_class in ((Terminal(), RichReporter), (io.StringIO(), PlainReporter)):
        reporter_class(stream).announce("compiling")
        assert "compiling\n" in stream.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize(("stream", "reporter_class"), [(Terminal, RichReporter), (io.StringIO, PlainReporter)])
def test_where_no_details_are_asked_for_short_work_leaves_what_is_told_alone(stream, reporter_class):
    seen = stream()
    reporter = reporter_class(seen)
    with reporter.stage("load", total=3) as stage:
        stage.advance(3)
    reporter.note("a detail")
    reporter.table("sizes", ("name", "bytes"), [("weights", "10")])
    reporter.tell("ready [1]")
    assert seen.getvalue() == "ready [1]\n"


def test_a_pipe_gets_a_line_of_a_stage_that_took_long(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_INTERVAL_S", 0.0)
    stream = io.StringIO()
    with PlainReporter(stream).stage("compile pieces", total=2) as stage:
        stage.advance()
    assert re.fullmatch(r"compile pieces: 50 % after 0\.\d s\ncompile pieces: 0\.\d\d s\n", stream.getvalue())


def test_a_terminal_gets_a_bar_of_a_stage_that_takes_long_and_the_bar_leaves_nothing(monkeypatch):
    class Now:
        """A timer whose time is over when it starts."""

        def __init__(self, seconds, function):
            self.start = function

        def cancel(self):
            pass

    monkeypatch.setattr(progress.threading, "Timer", Now)
    stream = Terminal()
    reporter = RichReporter(stream)
    with reporter.stage("load weights", total=4) as stage:
        stage.advance(2)
        reporter.tell("ready")
    text = plain(stream.getvalue())
    assert "load weights" in text and "ready\n" in text
    assert "✓" not in text
    assert stream.getvalue().rpartition("━")[2].count("\x1b[2K") == 1, "the line of the bar is empty again"
    reporter.tell("after")
    assert stream.getvalue().endswith("after\n")


def test_a_reporter_of_a_callers_own_that_announces_nothing_gets_it_as_a_note():
    notes = []
    timeline = Timeline(SimpleNamespace(note=notes.append))
    timeline.announce("compiling")
    timeline.tell("ready")
    assert notes == ["compiling", "ready"]


def test_a_terminal_sees_stages_inside_each_other_and_then_their_seconds():
    stream = Terminal()
    reporter = RichReporter(stream, details=True)
    with reporter.stage("compile"), reporter.stage("piece", total=2) as stage:
        stage.advance()
    with reporter.stage("load"):
        pass
    reporter.note("done [1]")
    reporter.table("sizes", ("name", "bytes"), [("[w]", "10")])
    text = plain(stream.getvalue())
    assert "✓ compile" in text
    assert "✓ piece" not in text
    assert "✓ load" in text
    assert "done [1]" in text
    assert "[w]" in text


@pytest.mark.parametrize(
    "make", [NullReporter, LogReporter, lambda: PlainReporter(io.StringIO()), lambda: RichReporter(Terminal())]
)
def test_a_stage_that_fails_passes_its_error_on_and_the_next_one_works(make):
    reporter = make()
    with pytest.raises(ValueError, match="x"), reporter.stage("a"):
        raise ValueError("x")
    with reporter.stage("b") as stage:
        stage.advance()


def test_a_stage_that_fails_is_not_shown_as_done():
    for stream, reporter_class in ((Terminal(), RichReporter), (io.StringIO(), PlainReporter)):
        with pytest.raises(ValueError, match="x"), reporter_class(stream, details=True).stage("a"):
            raise ValueError("x")
        assert "✓" not in stream.getvalue()
        assert "a: " not in stream.getvalue()
