"""The end that hands pages over: a port, where other engines ask for pages by their keys.

Values are read where they lie, in the slots of the host's memory, while the engine goes on. A slot may get another
content meanwhile: then the answer says so behind the value, and the other end drops it. A stranger at the port is
refused ahead of any other word, and all waits and sizes are bounded.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mllm_compile.errors import ConfigError
from mllm_compile.kv_connectors.peers import frames
from mllm_compile.kv_connectors.peers.meeting import (
    Hello,
    RefusedError,
    Welcome,
    deadline,
    difference,
    facts_of,
    receive,
)
from mllm_compile.kv_connectors.peers.memory import LentMemory
from mllm_compile.process.shared_secret import send_line, wait_until
from mllm_compile.runtime.schedule.tiers.handover import HandOver
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.tiers.connector import Namespace

if TYPE_CHECKING:
    from mllm_compile.kv_connectors.peers.nixl import NixlLender

logger = logging.getLogger("mllm_compile.tiers")

_MOST_CONNECTIONS = 128
_MOST_STRANGERS = 32  # of them, that have not met: for one more the first one is cut
_MEETING_S = 10.0
_IDLE_S = 120.0
_REST_S = 0.1
_STORED_S = 3.0  # promised pages are waited for so long

ValueOf = Callable[[int, bool], np.ndarray]


class Port:
    """A socket that listens, ahead of the engine that answers there.

    Raises:
        ConfigError: the address or the port is not to be had.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            self.socket = socket.create_server((host, port), backlog=_MOST_CONNECTIONS, family=_family_of(host))
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror or error}"
            raise ConfigError(
                f"runtime.kv_transfer_config: {host}:{port} {why}. Set kv_ip to an address of this host and kv_port to "
                "a free port; 0 takes any."
            ) from error
        self.number: int = self.socket.getsockname()[1]


class Giver:
    """
    Args:
        port: where it answers; it is closed with this.
        namespace: what its pages depend on.
        value_of: gives the bytes of a slot of pages, or of states (True).
        memory: lends the host's memory; None: it is private.
        nixl: lends it by NIXL too.
        offset_of: of a value in that memory.
    """

    def __init__(
        self,
        port: Port,
        secret: bytes,
        engine_id: str,
        namespace: Namespace,
        handover: HandOver,
        value_of: ValueOf,
        memory: LentMemory | None,
        offset_of: Callable[[np.ndarray], int],
        nixl: NixlLender | None = None,
    ) -> None:
        self._port, self._secret, self._engine_id, self._namespace = port, secret, engine_id, namespace
        self._facts = facts_of(namespace)
        self._handover, self._value_of = handover, value_of
        self._memory, self._nixl, self._offset_of = memory, nixl, offset_of
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="mllm-kv-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends; a value that is on its way is cut. No slot is read behind this."""
        with self._lock:
            self._is_closed = True
            open_now = [*self._connections]
        with suppress(OSError):
            self._port.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._port.socket.close()
        for connection in open_now:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for thread in [*self._threads]:
            thread.join()
        if self._memory is not None:
            self._memory.close()
        if self._nixl is not None:
            self._nixl.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (place, *_) = self._port.socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_REST_S)  # there are too many open files
                continue
            thread = threading.Thread(target=self._serve, args=(connection, place), name="mllm-kv-give", daemon=True)
            with self._lock:
                if len(self._strangers) >= _MOST_STRANGERS:
                    self._cut_first()
                is_welcome = not self._is_closed and len(self._connections) < _MOST_CONNECTIONS
                if is_welcome:
                    self._connections.add(connection)
                    self._strangers[connection] = None
                    self._threads.add(thread)
            if is_welcome:
                self._start(thread, connection)
            else:
                connection.close()

    def _cut_first(self) -> None:
        first = next(iter(self._strangers))
        del self._strangers[first]
        self._connections.discard(first)
        with suppress(OSError):
            first.shutdown(socket.SHUT_RDWR)  # its thread ends

    def _start(self, thread: threading.Thread, connection: socket.socket) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            logger.warning("an engine is handed nothing: %s", error)
            self._forget(thread, connection)

    def _forget(self, thread: threading.Thread, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)
            self._threads.discard(thread)
        connection.close()

    def _serve(self, connection: socket.socket, place: str) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._let_in(connection, place):
                with self._lock:
                    self._strangers.pop(connection, None)
                self._answer_all(connection)
        except RefusedError as error:
            logger.warning("an engine at %s is handed nothing: %s", place, error)
        except (OSError, EOFError, ValueError) as error:
            if not self._is_closed:
                logger.debug("a connection of %s has ended: %s", place, error or type(error).__name__)
        finally:
            self._forget(threading.current_thread(), connection)

    def _let_in(self, connection: socket.socket, place: str) -> bool:
        hello, session = receive(connection, self._secret, deadline(_MEETING_S))
        refusal = self._refusal(hello)
        connection.settimeout(_MEETING_S)
        if refusal is not None:
            logger.warning("an engine at %s is handed nothing: %s", place, refusal)
            send_line(connection, session, Welcome(refusal))
            return False
        memory = self._memory
        told = Welcome(None) if memory is None else Welcome(None, memory.name, memory.pass_word())
        if self._nixl is not None:
            told = replace(told, nixl_agent=self._nixl.lent.agent, nixl_address=self._nixl.lent.address)
        send_line(connection, session, told)
        return True

    def _refusal(self, hello: Hello) -> str | None:
        if hello.engine_id != self._engine_id:
            return f"engine {hello.engine_id} is not here any more: {self._engine_id} is"
        if (found := difference(self._facts, hello.facts)) is not None:
            return found
        sizes, theirs = (self._namespace.page_bytes, self._namespace.state_bytes), (hello.page_bytes, hello.state_bytes)
        return None if sizes == theirs else f"bytes of a page and of a state are {sizes} there and {theirs} here"

    def _answer_all(self, connection: socket.socket) -> None:
        mapped: list[tuple[bytes, Entry | None]] = []
        of_mapped = False
        while (question := frames.read_question(connection, _IDLE_S, _MEETING_S)) is not None:
            kind, is_state, keys = question
            if kind == frames.HELD:
                connection.settimeout(_MEETING_S)
                connection.sendall(self._held(mapped, of_mapped))
                continue
            self._handover.wait_for(keys, _STORED_S)
            found = [(key, self._handover.find(key, is_state)) for key in keys]
            size = self._namespace.state_bytes if is_state else self._namespace.page_bytes
            until = deadline(_MEETING_S + frames.seconds_for(size * len(keys)))
            wait_until(connection, until)
            if kind == frames.LOOKUP:
                connection.sendall(bytes(entry is not None for _, entry in found))
            elif kind == frames.LOAD:
                self._send(connection, found, is_state, until)
            else:
                mapped, of_mapped = found, is_state
                connection.sendall(self._places(found, is_state))

    def _send(
        self, connection: socket.socket, found: Sequence[tuple[bytes, Entry | None]], is_state: bool, until: float
    ) -> None:
        for key, entry in found:
            wait_until(connection, until)  # all values together have that long
            if entry is None:
                connection.sendall(frames.VALUE_HEAD.pack(0, 0))
                continue
            value = self._value_of(entry.slot, is_state)
            connection.sendall(frames.VALUE_HEAD.pack(1, frames.sum_of(key, value.data)))
            connection.sendall(value.data)
        connection.sendall(self._held(found, is_state))

    def _places(self, found: Sequence[tuple[bytes, Entry | None]], is_state: bool) -> bytes:
        if self._memory is None and self._nixl is None:
            raise ValueError("it asks for memory that is not lent")
        heads = []
        for _, entry in found:
            value = None if entry is None else self._value_of(entry.slot, is_state)
            offset = 0 if value is None or not value.size else self._offset_of(value)  # pages may hold nothing
            heads.append(frames.PLACE_HEAD.pack(value is not None, offset))
        return b"".join(heads)

    def _held(self, found: Sequence[tuple[bytes, Entry | None]], is_state: bool) -> bytes:
        """A flag for each value that is still the same; they count as fetched."""
        flags = [entry is not None and self._handover.find(key, is_state) is entry for key, entry in found]
        for (key, _), is_held in zip(found, flags, strict=True):
            if is_held:
                self._handover.fetched(key, is_state)
        return bytes(flags)


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
