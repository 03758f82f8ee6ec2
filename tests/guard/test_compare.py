"""The guard's verdicts: with times that are made up for each stage, and with trees that are slower."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_benchmark.cli

from benchmarks.guard import compare
from benchmarks.guard.compare import (
    FAILED,
    NEW,
    ON_PURPOSE,
    SAME,
    SLOWER,
    StageFailed,
    Verdict,
    as_record,
    judge,
    main,
    show_time,
)
from benchmarks.guard.registry import STAGES
from tests.guard.slowed_tree import ROOT, SLOWED, slowed_tree

ALL = [stage for stages in STAGES.values() for stage in stages]
OF_CPU = {stage.name for stage in STAGES["cpu"]}


class Machine:
    """How many times as long everything takes: up to three times, by other work that comes and goes."""

    def __init__(self, seed: int | None) -> None:
        self._noise, self._asked = None if seed is None else random.Random(seed), 0

    def factor(self) -> float:
        self._asked += 1
        if self._noise is None:
            return 1.0
        return (2.0 + math.sin(self._asked / 9)) * self._noise.uniform(0.95, 1.05)


class Timed:
    """A side whose rounds take what it is told, times what the machine makes of it at that moment."""

    def __init__(self, seconds: float | Iterator[float], machine: Machine | None = None, fails: str = "") -> None:
        self._seconds, self._machine, self._fails, self.asked = seconds, machine or Machine(None), fails, 0

    def begin(self, name: str) -> None:
        pass

    def answer(self) -> float:
        if self._fails:
            raise StageFailed(self._fails)
        return 0.0

    def seconds(self, name: str) -> float:
        self.asked += 1
        seconds = self._seconds if isinstance(self._seconds, float) else next(self._seconds)
        return seconds * self._machine.factor()


@pytest.mark.parametrize("stage", ALL, ids=lambda stage: stage.name)
@pytest.mark.parametrize("seed", [None, 0, 1, 2], ids=["quiet", "busy 0", "busy 1", "busy 2"])
def test_a_slower_stage_is_red_and_an_equal_one_is_not_on_a_quiet_and_on_a_busy_machine(stage, seed):
    def verdict(seconds: float) -> str:
        machine = Machine(seed)
        return judge(stage, Timed(0.010, machine), Timed(seconds, machine), {}).word

    assert verdict(0.010) == SAME
    assert verdict(0.010 * stage.threshold**2) == SLOWER


def test_a_stage_over_its_threshold_is_measured_again_and_only_twice_over_is_red():
    stage = STAGES["cpu"][0]
    tree = Timed(iter([0.020] * stage.rounds + [0.010] * stage.rounds))
    verdict = judge(stage, Timed(0.010), tree, {})
    assert (verdict.word, verdict.ratios) == (SAME, (2.0, 1.0))
    assert tree.asked == 2 * stage.rounds
    assert judge(stage, Timed(0.010), Timed(0.020), {}).ratios == (2.0, 2.0)


def test_a_stage_that_the_base_lacks_is_new_and_one_that_fails_here_is_red():
    stage = STAGES["cpu"][0]
    assert judge(stage, Timed(0.010, fails="AttributeError: no such thing"), Timed(0.010), {}).word == NEW
    failed = judge(stage, Timed(0.010), Timed(0.010, fails="ValueError: broken"), {})
    assert (failed.word, failed.why) == (FAILED, "ValueError: broken")


def test_a_stage_that_a_commit_says_is_slower_is_not_red_and_keeps_the_reason():
    stage = STAGES["cpu"][0]
    verdict = judge(stage, Timed(0.010), Timed(0.030), {stage.name: "it checks more"})
    assert (verdict.word, verdict.why) == (ON_PURPOSE, "it checks more")


def test_a_record_is_one_that_pytest_benchmark_reads(tmp_path, monkeypatch, capsys):
    verdict = judge(STAGES["cpu"][0], Timed(0.010), Timed(0.011), {})
    record = as_record([verdict, Verdict("decode step", NEW)], "0123")
    assert [entry["name"] for entry in record["benchmarks"]] == ["base", "tree"]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    monkeypatch.setattr("sys.argv", ["pytest-benchmark", "compare", str(path), "--group-by=group"])
    pytest_benchmark.cli.main()
    assert "tree" in capsys.readouterr().out


def test_nothing_to_compare_with_is_never_right(tmp_path, monkeypatch, capsys):
    assert main(["--base-dir", str(tmp_path)]) == 2
    assert "expected the root of another tree" in capsys.readouterr().err
    assert main(["--tree", str(tmp_path)]) == 2
    assert "make bench BASE_DIR=FOLDER" in capsys.readouterr().err
    monkeypatch.setattr(compare, "_has_gpu", lambda: False)
    assert main(["--kind", "gpu"]) == 2
    assert "there is no NVIDIA GPU here" in capsys.readouterr().err
    assert compare._told([Verdict("trace", NEW)], "0123", None) == 2
    assert compare._told([Verdict("trace", NEW), Verdict("passes", SAME)], "0123", None) == 0
    assert compare._told([Verdict("trace", SLOWER), Verdict("passes", SAME)], "0123", None) == 1


def test_a_stage_that_is_not_known_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "no such"])
    assert "expected some of trace, passes" in capsys.readouterr().err


@pytest.mark.parametrize(("slowed", "word"), [(("scheduler step",), SLOWER), ((), SAME)], ids=["slower", "equal"])
def test_a_tree_whose_scheduler_is_slower_is_red_and_an_equal_one_is_not(tmp_path, slowed, word):
    """Trees of the product itself, in two processes. `make test-all` slows every stage so."""
    tree = slowed_tree(tmp_path / "tree", *slowed)
    record = tmp_path / "record.json"
    given = ["--base-dir", str(ROOT), "--tree", str(tree), "--only", "scheduler step"]
    assert main([*given, "--json", str(record)]) == (1 if slowed else 0)
    assert verdicts_of(record) == {"scheduler step": word}


@pytest.mark.slow
def test_a_tree_in_which_every_stage_is_slower_is_red_in_each(tmp_path):
    tree = slowed_tree(tmp_path / "tree", *SLOWED)
    record = tmp_path / "record.json"
    assert main(["--base-dir", str(ROOT), "--tree", str(tree), "--json", str(record)]) == 1
    assert verdicts_of(record) == dict.fromkeys(OF_CPU, SLOWER)


@pytest.mark.slow
def test_an_equal_tree_is_red_nowhere(tmp_path):
    record = tmp_path / "record.json"
    assert main(["--base-dir", str(ROOT), "--tree", str(slowed_tree(tmp_path / "tree")), "--json", str(record)]) == 0
    assert verdicts_of(record) == dict.fromkeys(OF_CPU, SAME)


def verdicts_of(record: Path) -> dict[str, str]:
    benchmarks = json.loads(record.read_text())["benchmarks"]
    return {entry["group"]: entry["extra_info"]["verdict"] for entry in benchmarks}


def test_every_stage_of_a_cpu_has_a_slower_tree():
    assert SLOWED.keys() == OF_CPU


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 µs")])
def test_times_are_shown_in_the_unit_that_reads_best(seconds, text):
    assert show_time(seconds) == text
