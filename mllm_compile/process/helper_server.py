"""The side of a helper process that answers: frames over a socket, and limits that the kernel keeps.

A helper does for its parent what a stranger's input may make endless: render a template, compile a grammar. A request
that exceeds its processor time ends the process, even in the middle of one C call; memory is limited as well.
helper_process.py is the parent's side. Standard input is one end of a socket. A frame is one letter, eight bytes of
length, and so many bytes. The parent sends START once, with TERMS ahead of its body, then a REQUEST at a time, each
answered by one frame: START by READY. The parent reads the process's standard error while it waits.

The parent's end is told by a pipe into which nobody writes. The socket would not do: the kernel may tell of a request's
arrival after the request was read, and that signal would end the process.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

FRAME = struct.Struct(">cQ")
# Processor seconds that a request may take, and the descriptor of the pipe whose other end the parent holds.
TERMS = struct.Struct(">dI")
START, REQUEST, READY = b"T", b"Q", b"Y"

Answer = tuple[bytes, bytes]  # a letter that the two sides agree on, and a body


def serve(open_with: Callable[[bytes], Callable[[bytes], Answer]]) -> None:
    """Answers requests until the pipe of requests ends.

    Args:
        open_with: given START's body, makes the function that answers a request. It may import and prepare: the limit
            on time, which START begins with, does not hold for it.
    """
    with open(0, "rb", closefd=False) as requests:
        first = _read(requests)
        if first is None:
            return
        seconds, parent = TERMS.unpack_from(first)
        answer = open_with(first[TERMS.size :])
        _write(READY, b"")
        while (request := _read(requests)) is not None:
            with _limited(seconds, parent):
                kind, body = answer(request)
            del request
            _write(kind, body)


def limit_files_and(kind: int, num_bytes: int) -> None:
    """Lets this process write no file and dump no core, and limits its memory.

    Args:
        kind: resource.RLIMIT_AS for all addresses; resource.RLIMIT_DATA for what it writes to, so that large libraries
            do not count.
    """
    for limit, most in ((kind, num_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))


@contextmanager
def _limited(seconds: float, parent: int) -> Iterator[None]:
    """Has the kernel end this process when it takes too long, or when its caller ends meanwhile."""
    flags = fcntl.fcntl(parent, fcntl.F_GETFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which has no handler
    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, as the other end is closed
    yield
    fcntl.fcntl(parent, fcntl.F_SETFL, flags)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _read(requests: IO[bytes]) -> bytes | None:
    header = requests.read(FRAME.size)
    if len(header) < FRAME.size:
        return None
    size = FRAME.unpack(header)[1]
    body = requests.read(size)
    return body if len(body) == size else None


def _write(kind: bytes, body: bytes) -> None:
    rest = memoryview(FRAME.pack(kind, len(body)) + body)
    while rest:
        rest = rest[os.write(0, rest) :]
