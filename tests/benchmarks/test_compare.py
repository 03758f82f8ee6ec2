"""The comparer, on runs made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import compare as comparer
from tests.benchmarks.compare import FASTER, MISSING, NEW, REGRESSED, SAME, Timing, compare, has_regressed, main


def run_json(**timings: tuple[float, float]) -> dict[str, Any]:
    return {
        "machine_info": {"kind": "cpu-test"},
        "commit_info": {"id": "0123456789abcdef"},
        "datetime": "2026-01-02T03:04:05",
        "benchmarks": [
            {"name": name, "stats": {"min": seconds}, "extra_info": {"reference_s": reference_s, "iterations": 1}}
            for name, (seconds, reference_s) in timings.items()
        ],
    }


def write(folder: Path, run: dict[str, Any]) -> str:
    (folder / "run.json").write_text(json.dumps(run))
    return str(folder / "run.json")


def test_each_verdict():
    timings = {name: Timing(seconds, 1.0) for name, seconds in {"a": 1.1, "b": 2.1, "c": 0.4, "d": 9.0}.items()}
    lines = compare(timings, {"a": 1.0, "b": 1.0, "c": 1.0, "gone": 1.0}, threshold=2.0)
    assert {line.name: line.verdict for line in lines} == {
        "a": SAME,
        "b": REGRESSED,
        "c": FASTER,
        "d": NEW,
        "gone": MISSING,
    }
    assert has_regressed(lines)
    assert has_regressed(lines[-1:]), "a benchmark that is gone watches over nothing"
    assert not has_regressed([line for line in lines if line.verdict in (SAME, FASTER, NEW)])


def test_a_slower_machine_is_no_regression():
    (line,) = compare({"step": Timing(4.0, 8.0)}, {"step": 1.0 / 2.0}, threshold=1.1)
    assert line.verdict == SAME


def test_a_saved_run_is_the_baseline_of_the_next(tmp_path, capsys):
    assert main([write(tmp_path, run_json(step=(1.0, 2.0))), "--baselines", str(tmp_path), "--save"]) == 0
    saved = json.loads((tmp_path / "cpu-test.json").read_text())
    assert saved == {"date": "2026-01-02", "commit": "0123456789ab", "ratios": {"step": 0.5}}
    capsys.readouterr()
    assert main([write(tmp_path, run_json(step=(1.1, 2.0))), "--baselines", str(tmp_path)]) == 0
    assert "+10%" in capsys.readouterr().out
    assert main([write(tmp_path, run_json(step=(3.0, 2.0))), "--baselines", str(tmp_path)]) == 1
    assert "REGRESSED" in capsys.readouterr().out


def test_a_kind_of_machine_without_a_baseline_fails_nobody(tmp_path, capsys):
    assert main([write(tmp_path, run_json(step=(1.0, 2.0))), "--baselines", str(tmp_path)]) == 0
    assert "no baseline for machines of the kind cpu-test" in capsys.readouterr().out


@pytest.mark.parametrize("machine", [1.0, 20.0], ids=["idle", "busy"])
def test_a_step_that_is_slowed_is_noticed_on_an_idle_and_on_a_busy_machine(machine):
    """`machine`: how many times as long as at the baseline everything takes, the reference too."""
    threshold = comparer.THRESHOLDS["cpu"]
    baseline = {"step": Timing(seconds=0.002, reference_s=0.001).ratio}

    def slowed(times: float) -> bool:
        timing = Timing(seconds=0.002 * machine * times, reference_s=0.001 * machine)
        return has_regressed(compare({"step": timing}, baseline, threshold))

    assert not slowed(1.0) and not slowed(0.99 * threshold)
    assert slowed(1.01 * threshold) and slowed(3.0)


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 µs")])
def test_times_are_shown_in_the_unit_that_reads_best(seconds, text):
    assert comparer.show_time(seconds) == text
