"""Node 0 of several hosts: waits for the ranks of the others, which their own commands start (node.py)."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from mllm_compile.errors import DeviceError
from mllm_compile.ranks.admission import Hello, WrongSecretError, admit, answer, difference
from mllm_compile.runtime.ranks.sealed import SealedConnection

NODES_S = 300.0  # all nodes have come so long after node 0 has its runtime
_POLL_S = 0.2
_MOST_WAITING = 128  # connections that prove themselves at a time
# Seconds, seconds and a count for a connection without words; milliseconds for words that nobody has acknowledged.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}


class RemoteRank:
    """A follower on another host: it is there as long as its connection is.

    Attributes:
        pid: 0, as it has none here.
        place: its node, for people.
        reason: says how it ended.
        session: the session's key.
        sealed: the connection, for all that follows when it is let in.
    """

    pid = 0

    def __init__(self, connection: socket.socket, session: bytes, hello: Hello, place: str) -> None:
        """
        Args:
            place: the other end's address.
        """
        self.socket, self.place = connection, f"on node {hello.node} ({place})"
        self.reason: Callable[[], str] = lambda: "has ended: that node's command says why"
        self.session, self.sealed = session, SealedConnection(connection, session, is_rank_0=True)
        self._is_closed = False

    def has_ended(self) -> bool:
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def end_of(self) -> str:
        return self.reason()

    def kill(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # it ends with its connection

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.kill()
            self.socket.close()


class Nodes:
    """The other hosts of one group, whose ranks are behind those of this one.

    Attributes:
        num_local: ranks of this host.
        host, port: where it is listened.
    """

    def __init__(self, host: str, port: int, node_of: Mapping[int, int], secret: bytes, own: Hello) -> None:
        """Listens.

        Args:
            port: 0: any that is free.
            node_of: of each rank of another host, the number of that host.
            own: what rank 0 runs, which the others have to run too.

        Raises:
            DeviceError: the address or the port is not to be had.
        """
        self.num_local, self._node_of = min(node_of), node_of
        self._secret, self._own = secret, own
        self.host = host
        self._lock = threading.Lock()
        self._came: dict[int, RemoteRank] = {}
        self._refusal: str | None = None
        self._strangers: list[str] = []
        self._is_waiting = True
        self._meetings = threading.Semaphore(_MOST_WAITING)
        try:
            self._listener = socket.create_server((host, port), backlog=_MOST_WAITING)
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror or error}"
            raise DeviceError(
                f"runtime.master_port: {host}:{port} {why}. Set another port, the same on each node; "
                "runtime.master_addr is an address of node 0."
            ) from error
        self.port: int = self._listener.getsockname()[1]

    def wait(self) -> dict[int, RemoteRank]:
        """The ranks of the other hosts, by their numbers; all are let in together.

        Raises:
            DeviceError: one runs something else, or not all came in time.
        """
        wanted = set(self._node_of)
        deadline = time.monotonic() + NODES_S
        self._listener.settimeout(_POLL_S)
        try:
            while lacking := wanted - self._here():
                self._check()
                if time.monotonic() > deadline:
                    raise DeviceError(self._lacking(lacking))
                with suppress(TimeoutError):
                    connection, (place, *_) = self._listener.accept()
                    if self._meetings.acquire(blocking=False):
                        threading.Thread(target=self._meet, args=(connection, place), daemon=True).start()
                    else:
                        connection.close()
            for rank in (came := self._end_waiting()).values():
                with suppress(OSError):  # it has ended: the group says so
                    answer(rank.socket, rank.session, None)
            return came
        except BaseException as error:
            for rank in self._end_waiting().values():
                with suppress(OSError):
                    answer(rank.socket, rank.session, f"node 0 has given up: {error}")
                rank.close()
            raise
        finally:
            self._listener.close()

    def _check(self) -> None:
        """
        Raises:
            DeviceError: one that has come is refused.
        """
        if self._refusal is not None:
            raise DeviceError(self._refusal)

    def _here(self) -> set[int]:
        """The ranks that have come; one that has ended since may come again."""
        with self._lock:
            for rank, process in list(self._came.items()):
                if process.has_ended():
                    self._came.pop(rank).close()
            return set(self._came)

    def _end_waiting(self) -> dict[int, RemoteRank]:
        """The ranks that have come; from now on none is let in."""
        with self._lock:
            self._is_waiting = False
            return dict(self._came)

    def _lacking(self, ranks: set[int]) -> str:
        nodes = sorted({self._node_of[rank] for rank in ranks})
        named = ", ".join(map(str, nodes))
        text = (
            f"node{'s' if len(nodes) > 1 else ''} {named} did not come to {self.host}:{self.port} within {NODES_S:.0f} "
            f"s. Start there what runs here, with --node-rank {nodes[0]}, and look whether the port is reached."
        )
        return text + (f" Connections that were refused: {'; '.join(self._strangers[-3:])}." if self._strangers else "")

    def _meet(self, connection: socket.socket, place: str) -> None:
        """Lets one rank in."""
        try:
            keep_alive(connection)
            hello, session = admit(connection, self._secret)
        except WrongSecretError as error:
            self._stranger(connection, f"{place}: {error}")
            return
        except (OSError, EOFError, ValueError) as error:
            self._stranger(connection, f"{place}: {error or type(error).__name__}")
            return
        finally:
            self._meetings.release()
        with self._lock:
            refusal = difference(self._own, hello) or self._misplaced(hello)
            if refusal is None:
                if hello.rank in self._came:  # it has ended
                    self._came[hello.rank].close()
                self._came[hello.rank] = RemoteRank(connection, session, hello, place)
                return
            self._refusal = self._refusal or refusal
        with suppress(OSError):
            answer(connection, session, refusal)
        connection.close()

    def _misplaced(self, hello: Hello) -> str | None:
        if not self._is_waiting:
            return "node 0 does not wait for ranks any more. Start all nodes again."
        is_there = hello.rank in self._came and not self._came[hello.rank].has_ended()
        if self._node_of.get(hello.rank) == hello.node and not is_there:
            return None
        return (
            f"rank {hello.rank} of node {hello.node} has come{' twice' if is_there else ''}; expected one command for "
            f"each --node-rank from 1 to {max(self._node_of.values())}."
        )

    def _stranger(self, connection: socket.socket, text: str) -> None:
        connection.close()
        with self._lock:
            self._strangers = [*self._strangers[-8:], text]

    def close(self) -> None:
        """Listens no more."""
        self._listener.close()


def keep_alive(connection: socket.socket) -> None:
    """Has the end of a host be noticed that says nothing more, and small frames sent at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
