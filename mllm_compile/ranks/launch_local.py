"""Starts followers as processes of this one, which end with it."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Protocol

from mllm_compile.process import child_python
from mllm_compile.process.group import ProcessGroup

logger = logging.getLogger("mllm_compile.ranks")

_MODULE = "mllm_compile.ranks.follower"
_LAST_LINES = 20
_MOST_OF_LINE = 1 << 12  # bytes


class RankProcess(Protocol):
    """A follower's process.

    Attributes:
        pid: its number on this host.
        socket: the other end of its connection.
    """

    pid: int
    socket: socket.socket

    def has_ended(self) -> bool:
        """True if it runs no more."""

    def end_of(self) -> str:
        """How it ended, for people."""

    def kill(self) -> None:
        """Ends it, if it has not ended, and does not wait."""

    def close(self) -> None:
        """Ends it and gives up what is held of it."""


class Launcher(Protocol):
    """Starts followers of one group."""

    def start(self, rank: int) -> RankProcess:
        """Starts a follower.

        Raises:
            OSError, MllmError: it cannot be started.
        """

    def close(self) -> None:
        """Gives up what the group had, whose followers are closed."""


class LocalLauncher:
    """Starts them as processes of this one."""

    def __init__(self, take: Callable[[int], LocalRank | None]) -> None:
        """
        Args:
            take: gives a rank's process that was started ahead, or None.
        """
        self._take = take

    def start(self, rank: int) -> LocalRank:
        """
        Raises:
            OSError: there is no room for it.
        """
        return self._take(rank) or LocalRank(rank)

    def close(self) -> None:
        """Nothing is held."""


class FollowerProcess:
    """A process that follows. Its last lines are kept, to be told where it ends."""

    def __init__(
        self, rank: int, connection: socket.socket, session: bytes | None = None, folders: Sequence[str] = ()
    ) -> None:
        """
        Args:
            connection: to rank 0; the caller closes its own copy.
            session: the session's key, of another host than rank 0's. The process reads it from its input.
            folders: the runtime's and that of the weights there.
        """
        self.rank, self._is_closed = rank, False
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._process = ProcessGroup(
            child_python.command(_MODULE, str(connection.fileno()), *folders),
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL if session is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_python.environment(),
        )
        self.pid = self._process.pid
        if self._process.stdin is not None and session is not None:
            with suppress(OSError), self._process.stdin as keys:  # it has ended: it is seen to
                keys.write(session)
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[bytes]) -> None:
        for line in iter(lambda: output.readline(_MOST_OF_LINE), b""):
            self._last_lines.append(text := line.decode(errors="replace").rstrip())
            logger.debug("rank %d: %s", self.rank, text)

    @property
    def code(self) -> int | None:
        """Its exit code; None: it runs."""
        return self._process.poll()

    def has_ended(self) -> bool:
        return self.code is not None

    def end_of(self) -> str:
        code = self.code
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        self._reader.join(0.5)
        said = " / ".join(line for line in self._last_lines if line.strip())[-600:]
        return how + (f"; its last lines: {said}" if said else "")

    def kill(self) -> None:
        self._process.kill_group()

    def close(self) -> None:
        if self._is_closed:  # its number may be another's now
            return
        self._process.kill_group()
        self._process.wait()
        self._reader.join(1.0)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._is_closed = True


class LocalRank(FollowerProcess):
    """A follower on rank 0's host."""

    def __init__(self, rank: int) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            super().__init__(rank, theirs)

    def close(self) -> None:
        super().close()
        self.socket.close()
