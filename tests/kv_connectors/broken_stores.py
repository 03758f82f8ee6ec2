"""Stores in memory: one that follows the interface, and some that each break it in one way."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mllm_compile.kv_connectors import VERSION, KVConnectorError, Namespace, Place

SHARED: dict[str, dict[str, memoryview | bytes]] = {}
HUNG = threading.Event()  # never set


class MemoryStore:
    """Values of the process, which outlive the store."""

    version = VERSION
    secret = b"s" * 32

    def __init__(self, namespace: Namespace, options: Mapping[str, Any]) -> None:
        self.values = SHARED.setdefault(namespace.name, {})
        self.options = options

    def name_of(self, place: Place) -> str:
        return place.name

    def lookup(self, places: Sequence[Place]) -> list[bool]:
        return [self.name_of(place) in self.values for place in places]

    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> list[bool]:
        flags = []
        for place, buffer in zip(places, buffers, strict=True):
            value = self.values.get(self.name_of(place))
            if value is not None:
                buffer[:] = value
            flags.append(value is not None)
        return flags

    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> list[bool]:
        self.values.update((self.name_of(place), bytes(value)) for place, value in zip(places, values, strict=True))
        return [True] * len(places)

    def remove(self, places: Sequence[Place]) -> None:
        for place in places:
            self.values.pop(self.name_of(place), None)

    def close(self) -> None:
        pass


class ChangesAByte(MemoryStore):
    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> list[bool]:
        flags = super().load(places, buffers)
        for buffer, flag in zip(buffers, flags, strict=True):
            if flag:
                buffer[len(buffer) // 2] ^= 1
        return flags


class KeepsTheCallersMemory(MemoryStore):
    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> list[bool]:
        self.values.update(zip(map(self.name_of, places), values, strict=True))
        return [True] * len(places)


class StopsAtTheFirstMiss(MemoryStore):
    def lookup(self, places: Sequence[Place]) -> list[bool]:
        flags = super().lookup(places)
        return flags[: flags.index(False)] if False in flags else flags


class MixesPagesAndStates(MemoryStore):
    def name_of(self, place: Place) -> str:
        return place.key.hex()


class ForgetsNamespaces(MemoryStore):
    def __init__(self, namespace: Namespace, options: Mapping[str, Any]) -> None:
        super().__init__(namespace, options)
        self.values = SHARED.setdefault("all", {})


class RemovesNothing(MemoryStore):
    def remove(self, places: Sequence[Place]) -> None:
        pass


class FailsOnAMissingRemoval(MemoryStore):
    def remove(self, places: Sequence[Place]) -> None:
        for place in places:
            del self.values[place.name]


class HasANewSecretEachTime(MemoryStore):
    def __init__(self, namespace: Namespace, options: Mapping[str, Any]) -> None:
        super().__init__(namespace, options)
        self.secret = secrets.token_bytes(32)


class IsOfAnotherVersion(MemoryStore):
    version = VERSION + 1


class HasAShortSecret(MemoryStore):
    secret = b"short"


class Lacks:
    """A class that is no store."""

    def __init__(self, namespace: Namespace, options: Mapping[str, Any]) -> None:
        pass


class Refuses(MemoryStore):
    def __init__(self, namespace: Namespace, options: Mapping[str, Any]) -> None:
        raise KVConnectorError("no server at 10.0.0.1:7")


class Raises(MemoryStore):
    def lookup(self, places: Sequence[Place]) -> list[bool]:
        raise RuntimeError("no route")

    load = store = lookup  # type: ignore[assignment]


class Hangs(MemoryStore):
    """Hangs from the call that its options name on."""

    def _hang(self, what: str) -> None:
        if self.options.get("at") == what:
            HUNG.wait()

    def lookup(self, places: Sequence[Place]) -> list[bool]:
        self._hang("lookup")
        return super().lookup(places)

    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> list[bool]:
        self._hang("load")
        return super().load(places, buffers)

    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> list[bool]:
        self._hang("store")
        return super().store(places, values)
