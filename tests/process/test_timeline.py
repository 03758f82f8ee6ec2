"""The start-up timeline: stages from the process's first moment, with the gaps."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import threading
import time

from mllm_compile.process import timeline as timeline_module
from mllm_compile.process.timeline import Span, Timeline, print_timeline, seconds_since_start, timeline_of, with_gaps

CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # of the kernel's note of when a process began


def test_stages_are_timed_with_what_is_inside_them_and_beside_them(monkeypatch):
    timeline = Timeline()
    now = itertools.count(100.0)
    monkeypatch.setattr(timeline_module, "seconds_since_start", lambda: next(now))
    with timeline.stage("outer"):
        with timeline.stage("inner"):
            pass
        thread = threading.Thread(target=run_stage, args=(timeline, "beside"))
        thread.start()
        thread.join()
    assert [(span.name, span.depth) for span in timeline.spans] == [("outer", 0), ("inner", 1), ("beside", 1)]
    assert [(span.start_s, span.end_s) for span in timeline.spans] == [(100, 105), (101, 102), (103, 104)]
    assert timeline.stages == [("outer", 5)]


def test_a_stage_that_fails_is_not_one_that_was_done():
    timeline = Timeline()
    with contextlib.suppress(ZeroDivisionError):
        run_failing_stage(timeline)
    assert timeline.spans == []
    with timeline.stage("next"):
        pass
    assert timeline.spans[0].depth == 0


def test_time_counts_from_the_process_not_from_the_import():
    code = "from mllm_compile.process.timeline import seconds_since_start; print(seconds_since_start())"
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole = time.clock_gettime(time.CLOCK_BOOTTIME) - before
    assert 0.0 < float(done.stdout) <= whole + 2 * CLOCK_TICK_S
    assert seconds_since_start() > whole, "this process is older than the one that it made"


def test_a_timeline_knows_its_age_whatever_that_of_its_process(monkeypatch):
    monkeypatch.setattr(timeline_module, "seconds_since_start", lambda: 100.0)
    timeline = Timeline()
    monkeypatch.setattr(timeline_module, "seconds_since_start", lambda: 102.5)
    assert timeline.age_s == 2.5


def test_a_stretch_that_no_stage_accounts_for_is_a_line():
    spans = [Span("a", 0.2, 1.0), Span("inside a", 0.5, 0.9, 1), Span("b", 1.01, 2.0), Span("c", 2.5, 3.0)]
    assert [(span.name, span.start_s) for span in with_gaps(spans)] == [
        ("(between stages)", 0.0),
        ("a", 0.2),
        ("inside a", 0.5),
        ("b", 1.01),
        ("(between stages)", 2.0),
        ("c", 2.5),
    ]


def test_it_is_printed_as_a_table_with_bars_to_scale():
    stream = io.StringIO()
    print_timeline(stream, [Span("import torch", 0.0, 1.0), Span("load", 1.0, 2.0)])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "2.00 s since the process began"
    assert lines[2].count("█") == lines[3].count("█") == 25


def test_a_timeline_is_not_wrapped_in_another():
    timeline = Timeline()
    assert timeline_of(timeline) is timeline
    assert timeline_of(None) is not timeline


def run_stage(timeline: Timeline, name: str) -> None:
    with timeline.stage(name):
        pass


def run_failing_stage(timeline: Timeline) -> None:
    with timeline.stage("fails"):
        raise ZeroDivisionError
