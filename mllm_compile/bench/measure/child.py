"""Runs processes for a measurement that end with their starter, and silently when that is interrupted.

Each leads a process group, so that Ctrl-C reaches the starter alone, which ends them by SIGTERM
(process/interruption.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from typing import IO

from mllm_compile.process.group import ProcessGroup

_END_S = 10.0  # to end a step, close the engine and remove what it unpacked


def run_children(
    commands: Sequence[Sequence[str]], stdout: int | IO[bytes], environment: dict[str, str], at_once: int = 1
) -> list[int]:
    """Runs each to its end and returns the exit codes; ends them when this process is interrupted.

    Args:
        at_once: the most that run side by side.
    """
    running: deque[ProcessGroup] = deque()
    codes = []
    try:
        for command in commands:
            if len(running) == at_once:
                codes.append(running[0].wait())
                running.popleft()
            running.append(ProcessGroup(command, stdout=stdout, env=environment))
        while running:
            codes.append(running[0].wait())
            running.popleft()
    except BaseException:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill_group()
        raise
    return codes
