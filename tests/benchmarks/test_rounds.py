"""Times are told when they are measured, and summed up behind the first round."""

from __future__ import annotations

import io

import pytest

from benchmarks.rounds import Rounds
from benchmarks.script import parser_of


def test_each_time_is_told_at_once_and_the_first_of_each_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = Rounds()
    for milliseconds in (90.0, 3.0, 1.0, 2.0):
        rounds.add("a copy", milliseconds)
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert rounds.timed("a call", lambda: 7) == 7
    capsys.readouterr()
    rounds.show()
    first, second = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "a copy first 90.0 ms, then 2.0, at most 3.0"
    assert second.startswith("a call ")


def test_a_single_time_is_its_own_median(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = Rounds()
    rounds.add("once", 5.0)
    rounds.show()
    last = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(last.split()) == "once first 5.0 ms, then 5.0, at most 5.0"


def test_a_script_writes_each_line_when_it_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written))
    parser_of("Measures.")
    print("a row")
    assert written.getvalue() == b"a row\n"
