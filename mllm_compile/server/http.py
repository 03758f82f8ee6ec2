"""Bodies and answers of HTTP, over ASGI."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

import msgspec

from mllm_compile.media.sound import MAX_BYTES
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.memory import Share, bytes_of_json
from mllm_compile.server.flow.writer import Headers, Send

T = TypeVar("T")

_BESIDE_SOUND = 1 << 20  # bytes of a form

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Bodies:
    """Reads bodies; bounds each.

    Args:
        most_bytes: of a body.
        most_s: a body that takes longer is given up: a few that never end would fill the room of all others.
        held: the bytes of a body and what is parsed of it.
        bound: what sets the bound.
    """

    def __init__(
        self,
        most_bytes: int,
        most_s: float = 60.0,
        held: Callable[[bytes], int] = bytes_of_json,
        bound: str = "the server's --max-body sets the bound",
    ) -> None:
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._held, self._bound = held, bound

    @classmethod
    def of_sounds(cls) -> Self:
        """For forms with one sound, which has a bound of its own."""
        return cls(MAX_BYTES + _BESIDE_SOUND, held=len, bound="cut the sound, or send fewer samples a second")

    async def read(self, receive: Receive, share: Share) -> bytes:
        """A request's body, whose share then holds what it will be when it is parsed.

        Raises:
            ApiError: it is too large, or too slow.
            ClientGoneError: there is nobody to answer.
        """
        parts: list[bytes] = []
        size = 0
        end = asyncio.get_running_loop().time() + self._most_s
        while True:
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                late = f"the body has not come within {self._most_s:g} s"
                raise ApiError(408, late, code="request_timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > self._most_bytes:
                whole = self._most_bytes % (1 << 20) == 0
                most = f"{self._most_bytes >> 20} MiB" if whole else f"{self._most_bytes:,} bytes"
                why = f"the body is larger than {most}; {self._bound}"
                raise ApiError(413, why, code="body_too_large")
            share.hold(size)
            parts.append(part)
            if not message.get("more_body"):
                body = b"".join(parts)
                share.hold(self._held(body))
                return body


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of work for a client that waits for it.

    Raises:
        ClientGoneError: the client has left before, and the work has ended.
    """
    gone = asyncio.ensure_future(receive())  # the body has come: nothing else follows
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        del task, gone  # an exception of theirs knows this frame: together they would live until a collection


def header(scope: Scope, name: bytes) -> str | None:
    """A request's header, the first of that name."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def key_of(scope: Scope) -> str:
    """The API key that a request gives; nothing where it gives none."""
    kind, _, value = (header(scope, b"authorization") or "").partition(" ")
    if kind == "Basic":  # a browser's: any name, and the key as password
        with contextlib.suppress(ValueError):
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
    return value.strip() or header(scope, b"x-api-key") or ""


def client_of(scope: Scope) -> str:
    """The program that asks, as it says itself."""
    return (header(scope, b"user-agent") or "-")[:60]


async def respond(send: Send, body: bytes, *, status: int = 200, headers: Headers = JSON) -> None:
    """Sends a whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, data: Any, status: int = 200) -> None:
    await respond(send, msgspec.json.encode(data), status=status)


async def respond_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    """Sends an error, in OpenAI's shape unless its body is given."""
    await respond(send, error.body if body is None else body, status=error.status, headers=[*JSON, *error.headers])
