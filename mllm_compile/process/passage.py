"""Open descriptors on their way between two processes: a device's memory, which stays while a process has one.

Free of what a server imports.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterable, Sequence

_MOST = 253  # descriptors of a message (SCM_MAX_FD of Linux's net/scm.h)
_MARK = b"m"  # a message without a byte is an end

VARIABLE = "MLLM_PASSAGE"  # of the environment: the number of an engine's end


class Passage:
    """One end. A side that is gone, or does not take them, loses what it was sent: then nobody holds that.

    Args:
        end: a connected socket that keeps messages apart, whose owner this is from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Passage, socket.socket]:
        """This process's end, and the socket of the other one."""
        end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(end), other

    def give(self, descriptors: Sequence[int]) -> None:
        """Sends the first 253 of them, at once or never, and closes all here."""
        try:
            if descriptors:
                with contextlib.suppress(OSError):
                    socket.send_fds(self._end, [_MARK], descriptors[:_MOST], socket.MSG_DONTWAIT)
        finally:
            close_all(descriptors)

    def take(self) -> list[int]:
        """The descriptors that have come, which are the caller's; programs that it starts do not get them. Waits for
        nothing."""
        taken = array.array("i")
        room, flags = socket.CMSG_LEN(_MOST * taken.itemsize), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        with contextlib.suppress(OSError):  # nothing more, or the other side is gone
            # Not socket.recv_fds, which leaves its flags out (Python 3.11).
            while (told := self._end.recvmsg(len(_MARK), room, flags))[0]:
                for _, _, some in told[1]:
                    taken.frombytes(some[: len(some) - len(some) % taken.itemsize])
        return taken.tolist()

    def close(self) -> None:
        """Ends it, with what nobody has taken."""
        self._end.close()


def close_all(descriptors: Iterable[int]) -> None:
    """Closes what this process does not use."""
    for descriptor in descriptors:
        os.close(descriptor)
