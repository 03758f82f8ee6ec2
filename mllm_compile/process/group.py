"""Starts a command whose processes all end when its starter does, also by kill -9.

Run as a script in front of the command: a fork of it waits for a pipe whose other end the starting process holds. The
kernel closes that end however the process ends, and the fork then kills the process group, which the command leads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any


class ProcessGroup(subprocess.Popen[Any]):
    """A command as the leader of a process group that does not outlive this process, or this object."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """
        Args:
            command: the program and its arguments.
            options: as subprocess.Popen takes them.

        Raises:
            OSError: there is no room for a process.
        """
        watched, held = os.pipe()
        try:
            wrapped = [sys.executable, "-E", "-S", "-P", __file__, str(watched), *command]
            passed = [watched, *options.pop("pass_fds", ())]
            super().__init__(wrapped, pass_fds=passed, process_group=0, **options)
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(watched)
        self._hold = weakref.finalize(self, os.close, held)
        _groups.add(self)

    def kill_group(self) -> None:
        """Ends the command and all that it has started, as long as any of them lives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _let_go() -> None:
    """Holds no group any more, in a fork of the process that does: it may outlive that one."""
    for group in tuple(_groups):
        group._hold()


os.register_at_fork(after_in_child=_let_go)


def _run(watched: int, command: Sequence[str]) -> None:
    if os.fork() == 0:
        os.closerange(0, watched)  # a reader of the command's output waits for its end alone
        os.closerange(watched + 1, 1 << 16)
        os.read(watched, 1)
        os.killpg(0, signal.SIGKILL)
    os.close(watched)
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2:])
