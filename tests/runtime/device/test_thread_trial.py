"""The threads that a trial chooses, the time that it takes, and the thread as it leaves it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mllm_compile.engine.start import cpu_threads
from mllm_compile.engine.start.cpu_threads import prepare_threads, try_threads
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.device import thread_trial
from mllm_compile.runtime.device.cpu_threads import CpuThreads
from mllm_compile.runtime.device.thread_trial import BUDGET_S, StepThreads, fastest
from tests.runtime.runner_cases import make_runner


class Machine:
    """A clock that a run moves on, by the number of threads."""

    def __init__(self, seconds: dict[int, float], monkeypatch) -> None:
        self.now, self.runs, self._seconds = 0.0, [], seconds
        monkeypatch.setattr(thread_trial, "use_threads", lambda count: setattr(self, "count", count))

    def run(self) -> None:
        self.runs.append(self.count)
        self.now += self._seconds[self.count]

    def fastest(self, most: int) -> int:
        return fastest(self.run, most, lambda: self.now)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({2: 0.020, 1: 0.030}, 2),
        ({2: 0.030, 1: 0.020}, 1),
        ({2: 0.0195, 1: 0.020}, 1),  # a second core for 2.5 %
        ({4: 0.010, 2: 0.008, 1: 0.015}, 2),
        ({8: 0.004, 4: 0.006, 2: 0.010, 1: 0.018}, 8),
    ],
)
def test_more_threads_are_chosen_where_they_are_faster(seconds, chosen, monkeypatch):
    machine = Machine(seconds, monkeypatch)
    assert machine.fastest(max(seconds)) == chosen
    assert set(machine.runs) == set(seconds)
    assert machine.now <= BUDGET_S


def test_a_disturbed_run_decides_nothing(monkeypatch):
    machine = Machine({2: 0.005, 1: 0.008}, monkeypatch)
    run, times = machine.run, []

    def disturbed() -> None:
        run()
        times.append(machine.now)
        if len(times) == 1:
            machine.now += 0.05

    machine.run = disturbed
    assert machine.fastest(2) == 2


def test_a_slow_step_is_run_once_and_gets_what_was_tried(monkeypatch):
    machine = Machine({4: 1.2, 2: 1.2, 1: 1.2}, monkeypatch)
    assert machine.fastest(4) == 4
    assert machine.runs == [4]


def test_a_step_that_is_longer_than_the_budget_is_run_twice_with_each_number(monkeypatch):
    machine = Machine({2: 0.4, 1: 0.3}, monkeypatch)
    assert machine.fastest(2) == 1
    assert machine.runs == [2, 1, 2, 1]


def test_a_runners_steps_are_tried_and_nothing_of_them_is_left():
    runner = make_runner()
    before = torch.get_num_threads()
    found = try_threads(runner, 2)
    assert {found.decode, found.prompt} <= {1, 2}
    assert torch.get_num_threads() == before
    assert runner.forward_pass_id == 0


def test_steps_get_the_threads_of_their_kind(monkeypatch):
    used = []
    monkeypatch.setattr(thread_trial, "use_threads", used.append)
    runner = make_runner()
    runner.step_threads = StepThreads(decode=1, prompt=2)
    try_threads(runner, 1)
    assert used.count(2) > 0
    assert set(used) == {1, 2}


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_clock_chooses_threads_in_the_deterministic_mode(deterministic, monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_threads, "threads_for", lambda weight_bytes: CpuThreads(2, "two cores"))
    tried = []
    monkeypatch.setattr(cpu_threads, "try_threads", lambda *args: tried.append(args) or StepThreads(1, 1))
    compiled = SimpleNamespace(artifact=SimpleNamespace(weights=(), measured_folder=tmp_path / "measured"))
    prepare_threads(compiled, make_runner(deterministic=deterministic), Timeline(), most=None)
    assert bool(tried) is not deterministic


def test_a_later_start_takes_what_was_found_until_a_day_is_over(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores, now, tried = 2, 1_000_000.0, []
    monkeypatch.setattr(cpu_threads, "threads_for", lambda weight_bytes: CpuThreads(cores, "cores"))
    monkeypatch.setattr(cpu_threads.time, "time", lambda: now)
    monkeypatch.setattr(cpu_threads, "try_threads", lambda runner, most: tried.append(most) or StepThreads(1, most))
    compiled = SimpleNamespace(artifact=SimpleNamespace(weights=(), measured_folder=tmp_path / "measured"))

    def threads_of_a_start() -> StepThreads | None:
        runner = make_runner()
        prepare_threads(compiled, runner, Timeline(), most=None)
        return runner.step_threads

    assert threads_of_a_start() == threads_of_a_start() == StepThreads(1, 2)
    assert tried == [2]
    now += 25 * 60 * 60
    threads_of_a_start()
    assert tried == [2, 2]
    cores = 4
    assert threads_of_a_start() == StepThreads(1, 4)
