"""How many threads are chosen; and, in processes of their own, whose they are and that idle ones do not spin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mllm_compile.runtime.device import cpu_threads
from mllm_compile.runtime.device.cpu_threads import (
    WEIGHT_BYTES_OF_A_THREAD,
    choose_threads,
    threads_for,
    usable_cores,
)


@pytest.mark.parametrize(
    ("weights", "cores", "allowed", "count", "why"),
    [
        (11 << 20, 2, 2, 1, "for 11 MiB of weights, of 2 cores"),
        (0, 64, 64, 1, "for 0 MiB of weights, of 64 cores"),
        (3 * WEIGHT_BYTES_OF_A_THREAD, 64, 64, 3, "for 96 MiB of weights, of 64 cores"),
        (2 << 30, 2, 2, 2, "all cores that this process may use"),
        (2 << 30, 64, 64, 64, "all cores that this process may use"),
        (2 << 30, 4, 8, 4, "all cores that this process may use"),
        (2 << 30, 64, 8, 8, "torch's setting, of 64 cores"),
        (11 << 20, 1, 1, 1, "all cores that this process may use"),
    ],
)
def test_a_model_gets_threads_by_its_weights_and_never_more_than_cores(weights, cores, allowed, count, why):
    chosen = choose_threads(weights, cores, allowed)
    assert (chosen.count, chosen.why) == (count, why)


def test_the_environment_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(cpu_threads.torch, "get_num_threads", lambda: 7)
    assert (threads_for(0).count, threads_for(0).why) == (7, "OMP_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_for(0).count == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.max": "what is this"}, 8),
    ],
)
def test_a_containers_share_counts(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert usable_cores(tmp_path, own) == cores


def test_affinity_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_cores(tmp_path, tmp_path / "none") == 1


def run_alone(script: str) -> str:
    """In a process that takes as many threads as it likes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout


COUNTED = """
import os, threading, torch
from mllm_compile.runtime.device.cpu_threads import use_threads, wait_briefly
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux has them")
def test_threads_are_set_for_the_calling_thread_alone():
    script = """
def work():
    before = count()
    for number in (1, 2):
        use_threads(number)
        torch.ones(1 << 22).neg_(); torch.ones(700, 700) @ torch.ones(700, 700)
        print(number, torch.get_num_threads(), count() - before)
thread = threading.Thread(target=work); thread.start(); thread.join()
print(torch.get_num_threads())
"""
    assert run_alone(COUNTED + script).splitlines() == ["1 1 0", "2 2 1", "3"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux has them")
def test_more_threads_than_cores_are_kept_so_that_none_spins_for_long():
    script = """
os.cpu_count = lambda: 4
before = count()
wait_briefly(); wait_briefly()
print(count() - before, torch.get_num_threads())
"""
    assert run_alone(COUNTED + script).split() == ["4", "3"], "the one that stays and its team, once"
