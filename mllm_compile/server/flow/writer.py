"""Writes one response from wherever its news come, without a task of its own while its reader keeps up.

`send` of an ASGI server is a coroutine that almost always ends at once. It is driven by hand here, which saves a task
switch a chunk. The front's own server takes most chunks in a plain call (connection.py). Where a chunk would wait,
because the reader is slow, a task waits for it, and what is pushed meanwhile follows.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, NamedTuple

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
WriteChunk = Callable[[bytes], bool]
# The ASGI extension, by its key in the scope, of a server that has a WriteChunk. It writes a part of a begun body in
# one call, and returns True; False where `send` would wait or fail.
CHUNKS = "mllm_compile.chunks"


class Outlet(NamedTuple):
    """Where one response goes."""

    send: Send
    write_chunk: WriteChunk | None = None


class Writer:
    """One response.

    Args:
        outlet: the ASGI server's.
        on_free: called when all that was pushed has gone out, after a wait.
    """

    def __init__(self, outlet: Outlet, on_free: Callable[[], None]) -> None:
        self._send, self._write_chunk = outlet
        self._on_free: Callable[[], None] | None = on_free
        self._queue: deque[Message] = deque()
        self._waiter: asyncio.Task[None] | None = None
        self.busy_since: float | None = None  # the reader is slow
        self.has_begun = False

    @property
    def is_busy(self) -> bool:
        return self.busy_since is not None

    def begin(self, status: int, headers: Headers) -> None:
        """Sends the response's head."""
        self.has_begun = True
        self._push({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, body: bytes, more: bool = True) -> None:
        """Sends a part of the body, not an empty one; the last one says more=False."""
        if more and self._write_chunk is not None and self.busy_since is None and self._write_chunk(body):
            return
        self._push({"type": "http.response.body", "body": body, "more_body": more})

    def close(self) -> None:
        """Drops data that waits for the reader."""
        if self._waiter is not None:
            self._waiter.cancel()

    def let_go(self) -> None:
        """Calls `on_free` no more; what was pushed goes out."""
        self._on_free = None

    def _push(self, message: Message) -> None:
        if self.busy_since is not None:
            self._queue.append(message)
            return
        sending: Coroutine[Any, Any, None] = self._send(message)  # type: ignore[assignment]
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self.busy_since = time.monotonic()
        self._waiter = asyncio.get_running_loop().create_task(self._wait(sending, waits_for))

    async def _wait(self, sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
        await _rest_of(sending, waits_for)
        while self._queue:
            self.busy_since = time.monotonic()
            await self._send(self._queue.popleft())
        self.busy_since = self._waiter = None
        if self._on_free is not None:
            self._on_free()


@types.coroutine
def _rest_of(sending: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Awaits a coroutine that was begun by hand, and stopped at `waits_for`."""
    yield waits_for
    yield from sending
