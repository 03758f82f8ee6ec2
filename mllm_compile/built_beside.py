"""What packages share and a compiler makes once: in a fork of the compiler process that begins before most is imported.

Whoever needs it waits for that fork, which holds a lock until it ends, and finds out what is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def start(folder: Path, name: str, build: Callable[[], None]) -> None:
    """Calls `build` in a fork, whose errors are printed and no more.

    Args:
        folder: theirs alone, and there until all who wait have ended.
        name: what is built; a file name.

    Raises:
        OSError: there are no locks on this file system, or there is no room for a process.
    """
    with open(_lock(folder, name), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the fork's too, until it ends
        if os.fork() == 0:
            _build_and_end(build, lock.fileno())


def wait(folder: Path, name: str) -> None:
    """Returns when the fork that builds it has ended, however it did."""
    with open(_lock(folder, name)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def _lock(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def _build_and_end(build: Callable[[], None], lock: int) -> NoReturn:
    try:
        # Nobody's requests are taken, and whoever waits for the compiler process' end does not wait for this one's.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, lock}:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(descriptor)
        build()
    except Exception:  # without it packages take longer, no more
        traceback.print_exc()
    finally:
        os._exit(0)
