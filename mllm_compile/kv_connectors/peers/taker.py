"""The end that fetches: a store below the host's memory, which asks the engine that a request names.

All that can go wrong costs the request its pages: they are computed. An engine that has failed is left alone for some
seconds, so that it does not cost each request its time. The memory that one has lent is let go when that engine ends:
it would stay taken else.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from mllm_compile.kv_connectors.peers import frames
from mllm_compile.kv_connectors.peers.meeting import RefusedError, deadline, hello_of, introduce
from mllm_compile.kv_connectors.peers.memory import borrow
from mllm_compile.kv_connectors.peers.nixl import BusyError, Lent, NixlReader
from mllm_compile.process.shared_secret import read_exactly
from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.runtime.tiers.connector import VERSION, Namespace
from mllm_compile.runtime.tiers.place import Place

logger = logging.getLogger("mllm_compile.tiers")

_REST_S = 20.0  # that an engine is left alone which has failed
_MOST_PEERS = 256
_MOST_PLACES = 1 << 18  # keys of pages that are to be fetched
_MOST_IDLE = 8  # connections of an engine
_LOOK_S = 2.0  # between two looks at whether engines are still there


class _Address(NamedTuple):
    engine_id: str
    host: str
    port: int


class PeerStore:
    """A KVConnector that writes nothing; `lookup_at` comes ahead of `load`. Several threads call it at once.

    Args:
        secret: of the engines.
        keys: the secret of keys of pages.
        page_size: tokens of a page.
        timeout_s: of a call, beside what its bytes take.
        nixl: reads values; None: they come as the other end has them.

    Attributes:
        takes_writes: False once it is closed.
    """

    version = VERSION
    share = 1.0

    def __init__(
        self,
        secret: bytes,
        keys: bytes,
        namespace: Namespace,
        page_size: int,
        timeout_s: float,
        nixl: NixlReader | None = None,
    ) -> None:
        self.secret, self._secret = keys, secret
        self._namespace, self._page_size, self._timeout_s, self._nixl = namespace, page_size, timeout_s, nixl
        self.takes_writes = True
        self._lock = threading.Lock()
        self._peers: OrderedDict[_Address, _Peer] = OrderedDict()
        self._peer_of: OrderedDict[tuple[bytes, bool], _Peer] = OrderedDict()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="mllm-kv-look", daemon=True)
        self._thread.start()

    def lookup_at(self, source: KVTransferParams, places: Sequence[Place]) -> list[bool]:
        """Asks the engine that a request names which of its pages it has."""
        wanted = set(source.remote_block_ids or ())
        asked = [place for place in places if place.depth // self._page_size - 1 in wanted]
        peer = self._peer(_Address(source.remote_engine_id or "", source.remote_host or "", source.remote_port or 0))
        found = set[bytes]()
        for start in range(0, len(asked), frames.MOST_KEYS):
            part = asked[start : start + frames.MOST_KEYS]
            flags = peer.lookup([place.key for place in part], part[0].is_state)
            if flags is None:
                break
            found |= {place.key for place, is_there in zip(part, flags, strict=True) if is_there}
        with self._lock:
            for place in places:
                if place.key in found:
                    self._peer_of[place.key, place.is_state] = peer
                    self._peer_of.move_to_end((place.key, place.is_state))
            while len(self._peer_of) > _MOST_PLACES:
                self._peer_of.popitem(last=False)
        return [place.key in found for place in places]

    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> list[bool]:
        """See KVConnector.load."""
        groups: defaultdict[_Peer, list[int]] = defaultdict(list)
        with self._lock:
            for number, place in enumerate(places):
                peer = self._peer_of.pop((place.key, place.is_state), None)
                if peer is not None:
                    groups[peer].append(number)
        flags = [False] * len(places)
        for peer, numbers in groups.items():
            for start in range(0, len(numbers), frames.MOST_KEYS):
                part = numbers[start : start + frames.MOST_KEYS]
                keys = [places[number].key for number in part]
                loaded = peer.load(keys, places[part[0]].is_state, [buffers[number] for number in part])
                for number, is_there in zip(part, loaded or [False] * len(part), strict=True):
                    flags[number] = is_there
        return flags

    def lookup(self, places: Sequence[Place]) -> list[bool]:
        """See KVConnector.lookup: a request that names no engine finds nothing."""
        return [False] * len(places)

    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> list[bool]:
        """See KVConnector.store: other engines get nothing that they have not asked for."""
        return [False] * len(places)

    def remove(self, places: Sequence[Place]) -> None:
        """See KVConnector.remove."""
        with self._lock:
            for place in places:
                self._peer_of.pop((place.key, place.is_state), None)

    def close(self) -> None:
        """See KVConnector.close."""
        self.takes_writes = False
        with self._lock:
            peers = [*self._peers.values()]
            self._peers.clear()
            self._peer_of.clear()
        for peer in peers:
            peer.close()
        self._is_closing.set()
        self._thread.join()
        if self._nixl is not None:
            self._nixl.close()

    def _look(self) -> None:
        while not self._is_closing.wait(_LOOK_S):
            with self._lock:
                peers = [*self._peers.values()]
            for peer in peers:
                peer.look()

    def _peer(self, address: _Address) -> _Peer:
        dropped: list[_Peer] = []
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = _Peer(address, self._secret, self._namespace, self._timeout_s, self._nixl)
                others = (one for one in self._peers.values() if one.is_at(address))
                peer.silent_until = max((one.silent_until for one in others), default=0.0)
            self._peers.move_to_end(address)
            while len(self._peers) > _MOST_PEERS:
                dropped.append(self._peers.popitem(last=False)[1])
        for one in dropped:
            one.close()
        return peer


class _Peer:
    """An engine that has prompts.

    Attributes:
        silent_until: time.monotonic() up to which nobody is asked at its address, whatever its id: a client names ids.
    """

    def __init__(
        self, address: _Address, secret: bytes, namespace: Namespace, timeout_s: float, nixl: NixlReader | None
    ) -> None:
        self._address, self._secret, self._timeout_s = address, secret, timeout_s
        self._hello = hello_of(namespace, address.engine_id)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._nixl, self._lent = nixl, Lent("", 0)
        self._memory: np.ndarray | None = None
        self._was_lent = False  # memory was asked for
        self._num_calls = 0
        self._rests_until = self.silent_until = 0.0
        self._is_closed = False

    def is_at(self, address: _Address) -> bool:
        """True if it listens there."""
        return self._address[1:] == address[1:]

    def look(self) -> None:
        """Closes connections that have ended; with the last one the memory goes."""
        with self._lock:
            ended = [one for one in self._idle if _has_ended(one)]
            self._idle = [one for one in self._idle if one not in ended]
            if not self._idle and not self._num_calls:
                self._memory, self._was_lent = None, False
        for connection in ended:
            connection.close()

    def lookup(self, keys: Sequence[bytes], is_state: bool) -> list[bool] | None:
        """A flag for each that it has; None: it does not answer."""

        def call(connection: socket.socket) -> list[bool]:
            until = deadline(self._timeout_s)
            frames.ask(connection, frames.LOOKUP, is_state, keys, until)
            return frames.read_flags(connection, len(keys), until)

        return self._call(call)

    def load(self, keys: Sequence[bytes], is_state: bool, buffers: Sequence[memoryview]) -> list[bool] | None:
        """Fills buffers; which of them hold their value. None: it does not answer."""

        def call(connection: socket.socket) -> list[bool]:
            until = deadline(self._timeout_s + frames.seconds_for(sum(map(len, buffers))))
            if (nixl := self._nixl) is not None:
                try:
                    return _read(connection, partial(nixl.read, self._lent), keys, is_state, buffers, until)
                except BusyError:  # another engine stands still: this one did nothing wrong
                    return [False] * len(keys)
            if (memory := self._memory) is not None:
                return _read(connection, partial(_copy, memory), keys, is_state, buffers, until)
            return _received(connection, keys, is_state, buffers, until)

        return self._call(call)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle, self._memory = self._idle, [], None
        for connection in idle:
            connection.close()

    def _call(self, function: Callable[[socket.socket], list[bool]]) -> list[bool] | None:
        if time.monotonic() < max(self._rests_until, self.silent_until):
            return None
        with self._lock:
            self._num_calls += 1
        try:
            return self._answer(function)
        finally:
            with self._lock:
                self._num_calls -= 1

    def _answer(self, function: Callable[[socket.socket], list[bool]]) -> list[bool] | None:
        connection: socket.socket | None = None
        try:
            connection, is_kept = self._connection()
            try:
                answer = function(connection)
            except (OSError, EOFError) as error:
                if not is_kept or isinstance(error, TimeoutError):
                    raise
                connection.close()  # it had ended since it was last used
                connection = self._connected()
                answer = function(connection)
        except (OSError, EOFError, ValueError, RefusedError) as error:
            if connection is not None:
                connection.close()
            self._failed(error)
            return None
        self._keep(connection)
        return answer

    def _failed(self, error: Exception) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            is_news = time.monotonic() >= self._rests_until
            self._memory, self._was_lent = None, False  # what is mapped stays in use, also of an engine that is gone
            self._rests_until = deadline(_REST_S)
            if isinstance(error, TimeoutError):
                self.silent_until = self._rests_until
        for connection in idle:
            connection.close()
        if is_news and not self._is_closed:
            what = error if str(error) else type(error).__name__
            place = f"{self._address.host}:{self._address.port}"
            logger.warning("the prefill engine at %s hands nothing over, so prompts are computed: %s", place, what)

    def _connection(self) -> tuple[socket.socket, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return self._connected(), False

    def _connected(self) -> socket.socket:
        until = deadline(self._timeout_s)
        connection = socket.create_connection((self._address.host, self._address.port), timeout=self._timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            welcome = introduce(connection, self._secret, self._hello, until)
            if self._nixl is not None:
                if welcome.nixl_agent is None:
                    raise RefusedError("it does not lend by NIXL: set transport of both to nixl, or of neither")
                self._lent = Lent(welcome.nixl_agent, welcome.nixl_address)
                return connection
            with self._lock:
                asks, self._was_lent = not self._was_lent and welcome.memory is not None, True
            if asks and welcome.memory is not None and welcome.pass_word is not None:
                with suppress(OSError, EOFError, ValueError):  # it is on another host: values come over the connection
                    self._memory = borrow(welcome.memory, welcome.pass_word)
        except BaseException:
            connection.close()
            raise
        return connection

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _received(
    connection: socket.socket, keys: Sequence[bytes], is_state: bool, buffers: Sequence[memoryview], until: float
) -> list[bool]:
    frames.ask(connection, frames.LOAD, is_state, keys, until)
    flags, is_whole = [], []
    for key, buffer in zip(keys, buffers, strict=True):
        flag, told = frames.VALUE_HEAD.unpack(read_exactly(connection, frames.VALUE_HEAD.size, until))
        if flag > 1:
            raise ValueError(f"a flag of {flag}")
        if flag:
            frames.read_into(connection, buffer, until)
        flags.append(flag == 1)
        is_whole.append(not flag or frames.sum_of(key, buffer) == told)
    held = frames.read_flags(connection, len(keys), until)
    if any(is_held and not is_good for is_held, is_good in zip(held, is_whole, strict=True)):
        raise ValueError("a value came damaged")  # another one is what its slot got meanwhile
    return [is_there and is_held for is_there, is_held in zip(flags, held, strict=True)]


def _read(
    connection: socket.socket,
    fill: Callable[[Sequence[tuple[int, memoryview]], float], None],
    keys: Sequence[bytes],
    is_state: bool,
    buffers: Sequence[memoryview],
    until: float,
) -> list[bool]:
    """Reads the other end's memory itself.

    Args:
        fill: fills buffers from their offsets there, until then.
    """
    frames.ask(connection, frames.MAP, is_state, keys, until)
    places = [*frames.read_places(connection, len(keys), until)]
    pairs = zip(buffers, places, strict=True)
    fill([(offset, buffer) for buffer, (is_there, offset) in pairs if is_there and buffer], until)
    frames.ask(connection, frames.HELD, is_state, (), until)
    held = frames.read_flags(connection, len(keys), until)
    return [is_there and is_held for (is_there, _), is_held in zip(places, held, strict=True)]


def _copy(memory: np.ndarray, values: Sequence[tuple[int, memoryview]], until: float) -> None:
    for offset, buffer in values:
        if offset + len(buffer) > memory.size:
            raise ValueError(f"an offset of {offset} in memory of {memory.size} bytes")
        np.frombuffer(buffer, dtype=np.uint8)[:] = memory[offset : offset + len(buffer)]


def _has_ended(connection: socket.socket) -> bool:
    """True of a connection without a question that has something to read: its end, or what nobody asked for."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
