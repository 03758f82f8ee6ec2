"""The memory of an engine, mapped by another one of the same host and user.

It is a file in memory without a name, which cannot shrink: a map of it never faults. Its descriptor goes over a Unix
socket, read-only, to an engine with the pass word that was told over the connection where both have proved themselves.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from contextlib import suppress

import numpy as np

from mllm_compile.kv_connectors.peers.meeting import deadline
from mllm_compile.process.shared_secret import read_exactly

_PASS_WORD = 32  # hexadecimal digits
_MOST_PASS_WORDS = 256
_ANSWER_S = 5.0
_REST_S = 0.1
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


class LentMemory:
    """The end that lends.

    Args:
        descriptor: of the file in memory, which stays the caller's.

    Attributes:
        name: of the socket, for `borrow`.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self.name = f"mllm-kv-{secrets.token_hex(16)}"
        self._pass_words: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._lend, name="mllm-kv-memory", daemon=True)
        self._thread.start()

    def pass_word(self) -> str:
        """A pass word for one borrower."""
        made = secrets.token_hex(_PASS_WORD // 2)
        with self._lock:
            self._pass_words[made] = None
            while len(self._pass_words) > _MOST_PASS_WORDS:
                self._pass_words.popitem(last=False)
        return made

    def close(self) -> None:
        """Lends no more; once."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join()
        os.close(self._file)

    def _lend(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_REST_S)  # there are too many open files
                continue
            with connection, suppress(OSError, EOFError):
                if _user_of(connection) != os.getuid():
                    continue
                word = read_exactly(connection, _PASS_WORD, deadline(_ANSWER_S)).decode("ascii", "replace")
                with self._lock:
                    is_known = word in self._pass_words
                    self._pass_words.pop(word, None)
                if is_known:
                    socket.send_fds(connection, [b"\1"], [self._file])


def borrow(name: str, pass_word: str) -> np.ndarray:
    """The memory, [bytes] uint8, not to be written.

    Raises:
        OSError, EOFError, ValueError: it is not of this host and user, or is gone.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect("\0" + name)
        if _user_of(connection) != os.getuid():
            raise ValueError("the memory is another user's")
        connection.sendall(pass_word.encode())
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise EOFError("no memory was lent")
    try:
        if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory could shrink")
        found = mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptors[0])
    return np.frombuffer(found, dtype=np.uint8)


def _user_of(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user
