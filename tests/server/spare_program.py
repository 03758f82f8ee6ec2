"""A program that a spare process becomes in tests, and a module that it imports ahead."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from mllm_compile.process.passage import Passage
from tests.hang_guard import until

while os.path.exists(os.environ.get("MLLM_TEST_GATE", "")):
    time.sleep(0.01)
if os.environ.get("MLLM_TEST_IMPORT_FAILS"):
    raise ImportError("this module cannot be imported")


def niceness() -> set[int]:
    """Of this process's threads."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            found.add(os.getpriority(os.PRIO_PROCESS, int(task)))
    return found


def main() -> None:
    """Tells what it is by the first descriptor, with what the second one says and what the third one brings; ends."""
    own, kept = int(sys.argv[1]), int(os.environ["MLLM_TEST_KEPT"])
    with socket.socket(fileno=int(os.environ["MLLM_TEST_PASSING"])) as passing:
        (brought,) = Passage(passing).take()
    said = [os.pread(one, 4, 0).decode() for one in (kept, brought)]
    os.close(brought)
    until(lambda: len(niceness()) == 1, "the thread that has imported is gone")
    told = {
        "arguments": sys.argv[1:],
        "name": Path("/proc/self/comm").read_text().strip(),
        "group": os.getpgid(0),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),
        "threads": threading.active_count(),
        "niceness": sorted(niceness()),
        "kept": said,
        "descriptors": sorted(os.listdir("/proc/self/fd")),
    }
    with socket.socket(fileno=own) as channel:
        channel.sendall(json.dumps(told).encode())
    sys.exit(7)
