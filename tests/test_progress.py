"""Reporters: what a terminal, a pipe and a library call see of long work."""

from __future__ import annotations

import io
import re

import pytest

from mllm_compile.progress import NullReporter, PlainReporter, RichReporter, reporter_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_reporter_fits_the_stream():
    assert isinstance(reporter_for(Terminal()), RichReporter)
    assert isinstance(reporter_for(io.StringIO(), plain_lines=True), PlainReporter)
    assert isinstance(reporter_for(io.StringIO()), NullReporter)


def test_a_pipe_gets_a_line_a_stage():
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    with reporter.stage("load", total=10) as stage:
        stage.advance(10)
    reporter.note("done [1]")
    reporter.table("sizes", ("name", "bytes"), [("weights", "10"), ("kv", "7")])
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("load: 0.")
    assert lines[1:] == ["done [1]", "sizes", "  name     bytes", "  weights     10", "  kv           7"]


def test_a_terminal_sees_stages_inside_each_other_and_then_their_seconds():
    stream = Terminal()
    reporter = RichReporter(stream)
    with reporter.stage("compile"), reporter.stage("piece", total=2) as stage:
        stage.advance()
    with reporter.stage("load"):
        pass
    reporter.note("done [1]")
    reporter.table("sizes", ("name", "bytes"), [("[w]", "10")])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "✓ compile" in text
    assert "✓ piece" not in text
    assert "✓ load" in text
    assert "done [1]" in text
    assert "[w]" in text


@pytest.mark.parametrize("make", [NullReporter, lambda: PlainReporter(io.StringIO()), lambda: RichReporter(Terminal())])
def test_a_stage_that_fails_passes_its_error_on_and_the_next_one_works(make):
    reporter = make()
    with pytest.raises(ValueError, match="x"), reporter.stage("a"):
        raise ValueError("x")
    with reporter.stage("b") as stage:
        stage.advance()


def test_a_stage_that_fails_is_not_shown_as_done():
    for stream, reporter_class in ((Terminal(), RichReporter), (io.StringIO(), PlainReporter)):
        with pytest.raises(ValueError, match="x"), reporter_class(stream).stage("a"):
            raise ValueError("x")
        assert "✓" not in stream.getvalue()
        assert "a: " not in stream.getvalue()
