"""A spare process, which has imported what an engine needs, and waits to become one that is started again.

Imports take two seconds of a start and more. A server has one such process for all its engines, from the first that is
ready on. It holds no device and no model; what it becomes is told when it is taken. One that still imports is not
taken: then the engine is started as the first one was. backend/spare.py is the process.

Free of what a server imports.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from mllm_compile.process import child_python
from mllm_compile.process.group import ProcessGroup

_MODULE = "mllm_compile.server.backend.spare"
# What a start from a runtime's folder imports. A test holds that hardly anything is missing.
ENGINE_IMPORTS = (
    "mllm_compile.server.backend.process",
    "mllm_compile.engine.engine",
    "mllm_compile.engine.start.assemble",
    "mllm_compile.engine.start.tiers",
    "mllm_compile.engine.rollouts.sleep",
    "safetensors.torch",
    "tokenizers",
)
_MOST_TOLD = 4096  # bytes of the numbers that it tells

Descriptors = tuple[int, int, int]
# A command and its variables, of the numbers that three descriptors will have.
Program = Callable[[int, int, int], tuple[Sequence[str], Mapping[str, str]]]


class Spare:
    """The process, if there is one; for one thread.

    Args:
        imports: modules that it imports.
    """

    def __init__(self, imports: Sequence[str] = ENGINE_IMPORTS) -> None:
        self._imports = imports
        self._process: ProcessGroup | None = None
        self._end: socket.socket | None = None

    def prepare(self) -> None:
        """Starts it, unless it runs, or the system has no room for a process."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        with suppress(OSError):
            end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with its_end:
                    self._process = ProcessGroup(
                        child_python.command(_MODULE, str(its_end.fileno()), *self._imports),
                        stdin=subprocess.DEVNULL,
                        env=child_python.environment(),
                        pass_fds=[its_end.fileno()],
                    )
                self._end = end
            except BaseException:
                end.close()
                raise

    def take(self, program: Program, descriptors: Descriptors) -> ProcessGroup | None:
        """Has it become a program with these descriptors; waits for nothing.

        Args:
            program: a module's, as `child_python.command` makes it.

        Returns:
            The process, which is the caller's now; None: it has not imported all, or does not run.
        """
        process, end = self._process, self._end
        if process is None or end is None:
            return None
        try:
            numbers = json.loads(end.recv(_MOST_TOLD, socket.MSG_DONTWAIT))
        except BlockingIOError:  # it imports
            return None
        except (OSError, ValueError):  # it has ended
            self.close()
            return None
        command, variables = program(*numbers)
        told = json.dumps([child_python.module_of(command), dict(variables)]).encode()
        try:
            socket.send_fds(end, [told], descriptors, socket.MSG_DONTWAIT)
        except OSError:
            self.close()
            return None
        self._process = self._end = None
        end.close()
        return process

    def close(self) -> None:
        """Ends it, unless somebody has taken it."""
        process, end = self._process, self._end
        self._process = self._end = None
        if end is not None:
            end.close()
        if process is not None:
            process.kill_group()
            process.wait()


@contextmanager
def spare_process() -> Iterator[Spare]:
    """A server's spare process, which ends with the block."""
    spare = Spare()
    try:
        yield spare
    finally:
        spare.close()
