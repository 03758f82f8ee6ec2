"""The start-up timeline: what ran when, from the process's first moment, with the gaps."""

from __future__ import annotations

import contextlib
import io
import threading
import time

from mllm_compile.timeline import Span, Timeline, print_timeline, seconds_since_start, timeline_of, with_gaps


def test_stages_are_timed_with_what_is_inside_them_and_beside_them():
    timeline = Timeline()
    with timeline.stage("outer"):
        with timeline.stage("inner"):
            time.sleep(0.01)
        thread = threading.Thread(target=run_stage, args=(timeline, "beside"))
        thread.start()
        thread.join()
    assert [(span.name, span.depth) for span in timeline.spans] == [("outer", 0), ("inner", 1), ("beside", 1)]
    outer, inner, _ = timeline.spans
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s
    assert inner.seconds >= 0.009


def test_a_stage_that_fails_is_not_one_that_was_done():
    timeline = Timeline()
    with contextlib.suppress(ZeroDivisionError):
        run_failing_stage(timeline)
    assert timeline.spans == []
    with timeline.stage("next"):
        pass
    assert timeline.spans[0].depth == 0


def test_time_counts_from_the_process_not_from_the_import():
    assert 0.0 < seconds_since_start() < 24 * 3600
    before = seconds_since_start()
    time.sleep(0.02)
    assert 0.01 < seconds_since_start() - before < 1.0


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
