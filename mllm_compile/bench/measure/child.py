"""How a process for one measurement ends when whoever started it is interrupted: without a word, its folders removed.

It has a process group of its own, so that Ctrl-C reaches the starter alone, who ends it by SIGTERM
(interruption.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO

_END_S = 10.0  # to end a step, close the engine and remove what it unpacked


def run_child(command: Sequence[str], stdout: int | IO[bytes], environment: dict[str, str]) -> int:
    """Runs it to its end and returns its exit code; ends it when this process is interrupted."""
    process = subprocess.Popen(command, stdout=stdout, env=environment, process_group=0)
    try:
        return process.wait()
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            continue
