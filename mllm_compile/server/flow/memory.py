"""The memory that requests hold: from the first byte of a body to the end of the answer, all of them together bounded.

A request's memory changes: first its body's bytes, then the parsed JSON, then its prompts and its answer's needs. Each
time the request says so; the parser of an object knows best what that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mllm_compile.server.api.errors import ApiError

_MOST_BYTES = 2 << 30
_BYTES_OF_VALUE, _BYTES_OF_OBJECT = 64, 256  # a text, a list; a dict, whose keys are texts as well


def bytes_of_json(text: bytes) -> int:
    """The bytes that a JSON text and what is parsed of it take, at about the most; commas in texts count too."""
    return len(text) + _BYTES_OF_VALUE * (text.count(b",") + text.count(b"[")) + _BYTES_OF_OBJECT * text.count(b"{")


class Memory:
    """The memory of all requests.

    Args:
        most: bytes; one request may hold more when no other holds any.

    Attributes:
        held: bytes that are held now.
    """

    def __init__(self, most: int = _MOST_BYTES) -> None:
        self._most = most
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """The share of one request, until it is over."""
        share = Share(self)
        try:
            yield share
        finally:
            share.hold(0)

    def change(self, before: int, after: int) -> None:
        """Counts what a request holds now.

        Raises:
            ApiError: with it all would hold too much.
        """
        others = self.held - before
        if after > before and others and others + after > self._most:
            raise ApiError(429, "requests hold too much memory; ask again", code="too_many_bytes", retry_after_s=1)
        self.held = others + after


class Share:
    """The memory that one request holds."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Holds so many bytes from now on, in place of those before.

        Raises:
            ApiError: all requests together would hold too much.
        """
        self._memory.change(self.num_bytes, num_bytes)
        self.num_bytes = num_bytes
