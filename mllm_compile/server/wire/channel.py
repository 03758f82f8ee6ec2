"""One end of the socket pair between the front and the engine's process: frames of bytes, in their order.

A frame is its length, a uint32, and its bytes. The sending thread writes to the socket itself, so a frame wakes only
the thread that waits for it. With queues and threads in between a first token would wait for each of these too. Data
that the other side does not take yet is kept here, and sent by a thread that lives until all of it is sent.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque

MOST_BYTES = 1 << 30  # of a frame; a body has at most 16 MiB, a tokenizer's files some tens
_HEAD = struct.Struct("=I")
_PART = 1 << 18  # about what the kernel keeps of such a socket


class Channel:
    """Sends and receives frames; `send` is for any thread, the rest for one.

    Args:
        end: a connected stream socket, whose owner this is from now on.

    Attributes:
        is_over: nothing more will come: the other side is gone, or what it sends is no frame.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()  # the beginning of a frame
        self.is_over = False
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._lock = threading.Lock()  # of what follows
        self._unsent: deque[bytes] = deque()  # the first is being sent; not empty: `_sender` runs
        self._sender: threading.Thread | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Sends a frame without waiting for the other side; one to a side that is gone is dropped.

        Raises:
            ValueError: it has more than MOST_BYTES.
        """
        if len(frame) > MOST_BYTES:
            raise ValueError(f"a frame has at most {MOST_BYTES} bytes, got {len(frame)}")
        head = _HEAD.pack(len(frame))
        with self._lock:
            if self._unsent:
                self._unsent.append(head + frame)
                return
            try:
                sent = self._socket.sendmsg((head, frame), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                return
            if sent < len(head) + len(frame):
                self._unsent.append((head + frame)[sent:])
                self._sender = threading.Thread(target=self._send_rest, name="mllm-channel", daemon=True)
                self._sender.start()

    def _send_rest(self) -> None:
        while True:
            try:
                self._send_whole(self._unsent[0])
            except OSError:  # the other side is gone, or this one is closed
                with self._lock:
                    self._unsent.clear()
                return
            with self._lock:
                self._unsent.popleft()
                if not self._unsent:
                    return

    def _send_whole(self, data: bytes) -> None:
        rest = memoryview(data)
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:  # uvloop does not let sockets wait that it watches
                writable.poll()

    def wait(self, seconds: float) -> list[bytes]:
        """The frames that have come, once there are any; none after so many seconds, or at the other side's end."""
        return self.read() if self._poll.poll(seconds * 1000) else []

    def read(self) -> list[bytes]:
        """The frames that have come, as far as they are whole; waits for nothing."""
        try:
            part = self._socket.recv(_PART, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        if not part:
            self.is_over = True
            return []
        data: bytes | bytearray = part
        if self._received:  # grows in its place: a large frame is not copied again with each of its parts
            self._received += part
            data = self._received
        frames, begin = [], 0
        while len(data) - begin >= _HEAD.size:
            (size,) = _HEAD.unpack_from(data, begin)
            if size > MOST_BYTES:  # no `send` has written this
                self.is_over = True
                break
            end = begin + _HEAD.size + size
            if end > len(data):
                break
            frames.append(bytes(data[begin + _HEAD.size : end]))
            begin = end
        if data is part:
            self._received += part[begin:]
        else:
            del self._received[:begin]
        return frames

    def close(self, linger_s: float = 0.0) -> None:
        """Closes this end; once.

        Args:
            linger_s: seconds that what is kept has to go out.
        """
        sender = self._sender
        if sender is not None:
            sender.join(linger_s)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the sender
        if sender is not None:
            sender.join()
        self._socket.close()
