"""The interface of stores of pages and states: files (disk.py), and those that others write.

A store has values by places; a value is some bytes, of one length for pages and one for states. It may lose any value
at any time, and says so: what does not come back is computed. It is named in runtime.kv_transfer_config. conformance.py
tests one. Free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from mllm_compile.runtime.tiers.place import Place

VERSION = 1
_FORMAT = 1  # of values


class KVConnectorError(Exception):
    """A store cannot be used; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """All values that fit one model with one kind of numerics. Values of others are never asked for.

    Attributes:
        name: 32 hexadecimal digits: a hash over the facts.
        facts: what values depend on besides their places.
        page_bytes, state_bytes: of a value; 0 where the model has no such values.
    """

    name: str
    facts: Mapping[str, str]
    page_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, facts: Mapping[str, str], page_bytes: int = 0, state_bytes: int = 0) -> Namespace:
        """The namespace of these facts; its name is of them alone."""
        name = blake2b(_text(facts), digest_size=16).hexdigest()
        return cls(name, facts, page_bytes, state_bytes)

    @property
    def text(self) -> bytes:
        """The facts, for people."""
        return _text(self.facts)


def _text(facts: Mapping[str, str]) -> bytes:
    return json.dumps({"format": str(_FORMAT), **facts}, sort_keys=True, indent=1).encode()


class KVConnector(Protocol):
    """A store, as the engine uses it. Several threads call it at once, but `close`, which comes last.

    It is made as `Class(namespace, options)`: a Namespace, and kv_connector_extra_config as it stands. All who share a
    store need its `secret`: keys under another one are others.

    Attributes:
        version: of this interface; VERSION.
        secret: 16 to 64 bytes, the same at each start.

    Raises:
        KVConnectorError: of the constructor: it cannot be used, and the engine serves without it.
    """

    version: int
    secret: bytes

    def lookup(self, places: Sequence[Place]) -> Sequence[bool]:
        """Tells which values there are. A request waits for the answer."""

    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """Fills buffers, writable bytes of a value's length each. False: it did not; the buffer may hold anything."""

    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> Sequence[bool]:
        """Keeps values, whose memory is its own until it returns alone. False: it does not. A value is there whole or
        not at all, also after a crash. One that is there already is the same."""

    def remove(self, places: Sequence[Place]) -> None:
        """Forgets values, if they are there."""

    def close(self) -> None:
        """Ends; values stay, for those that outlive the process."""
