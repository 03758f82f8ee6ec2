"""In a process of its own: the tests' process has teams of other threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, torch
from mllm_compile.runtime.device.idle_threads import end_idle_threads
torch.set_num_threads(4)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
x = torch.ones(1 << 22)
threads = []
for _ in range(2):
    total = float((x + 1).sum())
    threads.append(count() - before)
    end_idle_threads()
    threads.append(count() - before)
print(threads, total == 2 * len(x))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux has them")
def test_a_threads_team_ends_and_comes_back_with_its_next_work():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[3, 0, 3, 0] True"
