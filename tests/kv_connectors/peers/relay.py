"""A port before another one, which cuts, changes or holds back what passes, and counts it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

TO_HOST, TO_GUEST = "to the host", "to the guest"


@dataclass
class Relay:
    """
    Attributes:
        change: gets a direction, how many bytes went there over the connection, and the next ones; gives what passes.
            None: the connection is cut.
        passed: bytes by direction, of the connection that passed most.
    """

    change: Callable[[str, int, bytes], bytes | None] = lambda direction, at, data: data
    passed: dict[str, int] = field(default_factory=lambda: {TO_HOST: 0, TO_GUEST: 0})
    port: int = 0

    def pump(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        at = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                changed = self.change(direction, at, data)
                at += len(data)
                self.passed[direction] = max(self.passed[direction], at)
                if changed is None:
                    break
                target.sendall(changed)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """A relay before a port of this machine."""
    relay, threads, ends = Relay(), list[threading.Thread](), list[socket.socket]()
    listener = socket.create_server(("127.0.0.1", 0))
    relay.port = listener.getsockname()[1]

    def accept() -> None:
        while True:
            try:
                guest, _ = listener.accept()
            except OSError:
                return
            host = socket.create_connection(("127.0.0.1", port))
            ends.extend((guest, host))
            for pumped in ((TO_HOST, guest, host), (TO_GUEST, host, guest)):
                thread = threading.Thread(target=relay.pump, args=pumped, daemon=True)
                thread.start()
                threads.append(thread)

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield relay
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()
