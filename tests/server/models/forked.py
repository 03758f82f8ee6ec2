"""Engines of fakes as forks of their front, which has imported what they need: a start takes no two seconds of torch.

Channel, signals, exit codes and memory stay as they are. tests/server/models/test_real.py starts real processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from tests.server import fake_backend

_SET_PARENT_DEATH_SIGNAL, _SET_NAME = 1, 15  # of prctl(2)
_LIBC = ctypes.CDLL(None)


class ForkedGroup:
    """A stand-in for mllm_compile.process.group.ProcessGroup, over a fork.

    Args:
        command: the model's name, the descriptor of its channel, its settings.
        pass_fds: the descriptors that it keeps.
        env: its variables.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, pass_fds, env)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so, or is over
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def _reap(self, how: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


def _become(command: Sequence[str], kept: Sequence[int], variables: Mapping[str, str]) -> None:
    """Runs the backend in this fork, and ends it."""
    code = 70
    try:
        name, *arguments = command
        os.environ |= variables
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _LIBC.prctl(_SET_NAME, name.encode())
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            signal.signal(number, handler)
        first = 3
        for descriptor in (*sorted(kept), 1 << 12):  # the front's sockets: its clients wait for their ends
            os.closerange(first, descriptor)
            first = descriptor + 1
        sys.argv = ["fake_backend", *arguments]
        fake_backend.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
