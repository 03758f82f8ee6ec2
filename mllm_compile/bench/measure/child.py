"""Runs a process for one measurement that ends with its starter, and silently when that is interrupted.

It leads a process group, so that Ctrl-C reaches the starter alone, which ends it by SIGTERM (process/interruption.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO

from mllm_compile.process.group import ProcessGroup

_END_S = 10.0  # to end a step, close the engine and remove what it unpacked


def run_child(command: Sequence[str], stdout: int | IO[bytes], environment: dict[str, str]) -> int:
    """Runs it to its end and returns its exit code; ends it when this process is interrupted."""
    process = ProcessGroup(command, stdout=stdout, env=environment)
    try:
        return process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_END_S)
        process.kill_group()
        raise
