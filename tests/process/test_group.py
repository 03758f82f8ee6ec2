"""A command and all that it starts end with their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mllm_compile.process.group import ProcessGroup
from tests.hang_guard import until

# A command that starts another in a fork, as compilers are started, and then waits for ever.
COMMAND = """
import os, subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(os.getpid(), inner.pid, flush=True)
inner.wait()
"""
STARTER = """
import os, sys, time
from mllm_compile.process.group import ProcessGroup
group = ProcessGroup([sys.executable, "-c", sys.argv[1]])
if sys.argv[2:] and os.fork() == 0:
    os.close(1)
    time.sleep(1000)
sys.stdin.read()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    until(lambda: not is_alive(pid), f"the end of process {pid}")


@pytest.mark.parametrize("forks", [False, True])
def test_all_end_when_the_starting_process_is_killed_also_where_a_fork_of_it_lives_on(forks):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, COMMAND, *(["forks"] if forks else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert starter.stdin is not None and starter.stdout is not None
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) == 2
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    try:
        for pid in pids:
            wait_for_end(pid)
    finally:
        for stream in (starter.stdin, starter.stdout):
            stream.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)  # the fork


def test_it_reads_writes_and_ends_as_the_command_does():
    group = ProcessGroup(
        [sys.executable, "-c", "import sys; print(sys.stdin.read()[::-1]); sys.exit(3)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert group.communicate("abc")[0] == "cba\n"
    assert group.returncode == 3
    group.kill_group()


def test_a_command_that_ends_alone_lets_its_readers_go_on_while_the_group_is_held():
    group = ProcessGroup(["/bin/sh", "-c", "echo $$; kill -9 $$"], stdout=subprocess.PIPE, text=True)
    assert group.stdout is not None
    assert int(group.stdout.read()) == group.pid
    assert group.wait() == -signal.SIGKILL
    group.kill_group()


def test_what_is_left_of_a_group_can_be_ended():
    group = ProcessGroup([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True)
    assert group.stdout is not None
    _, inner = map(int, group.stdout.readline().split())
    os.kill(group.pid, signal.SIGKILL)
    group.wait()
    group.kill_group()
    wait_for_end(inner)
