"""A store that others have written, behind a guard: it may fail, hang or give back other bytes, and no request is lost.

Each call has a time; one that takes longer ends the use of the store, and may still write its own buffers, which
nobody reads. Values get a header with a sum. An error of a call is a line, and its values are computed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from mllm_compile.runtime.tiers.connector import VERSION, KVConnector, KVConnectorError, Namespace
from mllm_compile.runtime.tiers.place import Place
from mllm_compile.runtime.tiers.sealed import HEADER_BYTES, Seal

logger = logging.getLogger("mllm_compile.tiers")

_METHODS = ("lookup", "load", "store", "remove", "close")
_SECRET = range(16, 65)

MakeConnector = Callable[[Namespace, Mapping[str, Any]], KVConnector]


class GuardedConnector:
    """A KVConnector that keeps its word.

    Args:
        make: the class of the store.
        options: kv_connector_extra_config.
        timeout_s: of each call, the constructor's too.
        name: for lines.

    Attributes:
        takes_writes: False once it is not used any more.

    Raises:
        KVConnectorError: the store cannot be used, or is none.
    """

    version = VERSION
    share = 1.0

    def __init__(
        self,
        make: MakeConnector,
        namespace: Namespace,
        options: Mapping[str, Any],
        timeout_s: float,
        name: str,
    ) -> None:
        self._timeout_s, self._name = timeout_s, name
        self.takes_writes = True
        self._seal = Seal(bytes.fromhex(namespace.name))  # the store may mix them up
        sizes = (size + HEADER_BYTES if size else 0 for size in (namespace.page_bytes, namespace.state_bytes))
        stored = Namespace(namespace.name, namespace.facts, *sizes)
        made = self._call("its constructor", lambda: check_made(make(stored, options)))
        if made is None:
            raise KVConnectorError(f"{name} cannot be made")
        if isinstance(made, KVConnectorError):
            raise made
        self._store: KVConnector = made
        self.secret = self._store.secret

    def lookup(self, places: Sequence[Place]) -> list[bool]:
        """See KVConnector.lookup."""
        return self._flags("lookup", places, self._store.lookup, places)

    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> list[bool]:
        """See KVConnector.load. A damaged value is removed."""
        got = [np.empty(HEADER_BYTES + len(buffer), dtype=np.uint8) for buffer in buffers]
        flags = self._flags("load", places, self._store.load, places, [one.data for one in got])
        for number, (place, value, buffer) in enumerate(zip(places, got, buffers, strict=True)):
            if not flags[number]:
                continue
            data = value[HEADER_BYTES:]
            if value[:HEADER_BYTES].tobytes() != self._seal.header(place, data):
                logger.warning("%s: a value came back damaged: it is removed, and its tokens are computed", self._name)
                self.remove([place])
                flags[number] = False
                continue
            np.frombuffer(buffer, dtype=np.uint8)[:] = data
        return flags

    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> list[bool]:
        """See KVConnector.store."""
        sealed = []
        for place, value in zip(places, values, strict=True):
            data = np.frombuffer(value, dtype=np.uint8)
            sealed.append(memoryview(self._seal.header(place, data) + data.tobytes()))
        return self._flags("store", places, self._store.store, places, sealed)

    def remove(self, places: Sequence[Place]) -> None:
        """See KVConnector.remove."""
        self._call("remove", lambda: self._store.remove(places))

    def close(self) -> None:
        """See KVConnector.close."""
        self._call("close", lambda: self._store.close())

    def _flags(self, what: str, places: Sequence[Place], method: Callable[..., Any], *arguments: Any) -> list[bool]:
        found = self._call(what, lambda: [bool(one) for one in method(*arguments)])
        if found is not None and len(found) != len(places):
            logger.warning("%s: %s gave %d flags for %d values", self._name, what, len(found), len(places))
            found = None
        return [False] * len(places) if found is None else found

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        """Calls in a thread of its own; None: it failed, with a line."""
        if not self.takes_writes:
            return None
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                answers.put((function(), None))
            except BaseException as error:
                answers.put((None, error))

        threading.Thread(target=run, name="mllm-connector", daemon=True).start()
        try:
            value, error = answers.get(timeout=self._timeout_s)
        except Empty:
            self.takes_writes = False
            logger.warning("%s is not used any more: %s took over %g s", self._name, what, self._timeout_s)
            return None
        if isinstance(error, KVConnectorError) and what == "its constructor":
            return error
        if error is not None:
            logger.warning("%s: %s failed: %s: %s", self._name, what, type(error).__name__, error)
        return value


def check_made(store: KVConnector) -> KVConnector:
    """The store itself.

    Raises:
        KVConnectorError: it is no store of this version.
    """
    missing = [name for name in _METHODS if not callable(getattr(store, name, None))]
    if missing:
        raise KVConnectorError(f"it lacks {', '.join(missing)}: expected a KVConnector (docs/lab/tiers.md)")
    version = getattr(store, "version", None)
    if version != VERSION:
        raise KVConnectorError(f"its version is {version!r}, expected {VERSION}: the interface has changed")
    secret = getattr(store, "secret", None)
    if not isinstance(secret, bytes) or len(secret) not in _SECRET:
        raise KVConnectorError("its secret is not of 16 to 64 bytes")
    return store
