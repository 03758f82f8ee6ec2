"""A connection of the front: limits its input beside bodies, gives one answer a request, and writes chunks of answers
in one call.

Bounded are the size of a request's head, the time that it takes to come, and the requests that are sent ahead of
answers. A malformed or oversized request is answered with an error behind the answers on their way, and nothing more is
read. `Upgrade` is passed over, as HTTP allows. A client that has shut its sending side gets its answers.

The parser of uvicorn's protocol keeps a header until it is whole, and copies it with each part that comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.flow.writer import CHUNKS

_MOST_BYTES = 256 << 10  # of a request, beside its body: head, trailers, and the frames of chunks
_MOST_HEADERS = 1000
_MOST_UNREAD = 32 << 20  # bytes behind what is refused
_MOST_AHEAD = 32  # requests behind one that has no answer yet: each takes many times the bytes that it is sent in
_HEAD_S = 75.0  # as long as a connection may be idle
_LINGER_S = 2.0  # for a refused client to read why; otherwise its further data would reset the connection
_FIRST_PROBE_S, _LAST_PROBE_S = 0.2, 15.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(HttpToolsProtocol):
    """A connection with such bounds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._beside_body = 0  # bytes since the last whole request
        self._head_bytes = 0
        self._is_in_head = False
        self._is_deaf = False  # input is not read
        self._answering: RequestResponseCycle | None = None  # `cycle` is the last one that was sent
        self._late: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        if self._probe is not None:
            self._probe.cancel()
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has shut its sending side, or has left: True leaves the connection open for answers.

        Only a write tells the one from the other, so answers that have not begun get interim ones ahead, which every
        client of HTTP/1.1 takes. One of HTTP/1.0 does not, and counts as gone, as does any whose request is not whole.
        """
        answering = self._answering
        if answering is None or answering.response_complete or answering.disconnected or self.scheme == "https":
            return False
        if answering.scope["http_version"] != "1.1" or (self.cycle.more_body and not self._is_deaf):
            return False
        self.cycle.keep_alive = False
        self._probe_after(_FIRST_PROBE_S)
        return True

    def _probe_after(self, seconds: float) -> None:
        self._probe = self.loop.call_later(seconds, self._ask_whether_gone, seconds)

    def _ask_whether_gone(self, waited_s: float) -> None:
        cycle = self._answering
        if cycle is not None and not cycle.response_started and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
        self._probe_after(min(2 * waited_s, _LAST_PROBE_S))

    # --- input ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._beside_body += len(data)
            if self._beside_body > _MOST_UNREAD:
                self.transport.close()
            return
        try:
            while data:
                self._beside_body += len(data)
                data = self._parse(data)
            if self._beside_body > _MOST_BYTES:
                raise _too_large()
        except ApiError as error:
            self._refuse(error)

    def _parse(self, data: bytes) -> bytes:
        """Reads data; returns a part to read again: a request with `Upgrade`, without that header.

        Its parser has left the body out, and would take it for a further request.

        Raises:
            ApiError: it is no request, or too large.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise ApiError(501, "CONNECT: this server is no proxy") from None
            version = self.parser.get_http_version().encode()
            headers = b"".join(b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade")
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, headers) + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, ApiError):  # of a callback
                raise error.__context__ from None
            raise bad_request("the connection's bytes are no HTTP request") from None
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._expect_head()
        self._is_in_head, self._head_bytes = True, 0
        if len(self.pipeline) >= _MOST_AHEAD:
            raise ApiError(429, f"more than {_MOST_AHEAD} requests wait for their answers on one connection")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer: nobody reads any, and it must not be taken for a header
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > _MOST_BYTES or len(self.headers) == _MOST_HEADERS:
            raise _too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._head_bytes + len(self.url) > _MOST_BYTES:
            raise _too_large()
        if self.parser.should_upgrade():
            return
        self._head_has_come()
        super().on_headers_complete()
        if not self.cycle.keep_alive:
            self.cycle.transport = _Last(self.transport, self._close)  # type: ignore[assignment]
        # The request's task has not begun yet.
        self.scope["extensions"] = {CHUNKS: {"write": partial(_write_chunk, self.cycle)}}

    def on_body(self, body: bytes) -> None:
        self._beside_body -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._beside_body = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._head_has_come()
        self._late = self.loop.call_later(_HEAD_S, self.transport.close)

    def _head_has_come(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # --- what is refused ----------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Reads nothing more. The client is told why, unless an answer is on its way: then that is the last one."""
        self._is_deaf, self._beside_body = True, 0
        self._head_has_come()
        is_whole = self.cycle is None or not self.cycle.more_body
        if not is_whole and self.pipeline:  # the body of a request that waits for its turn fails
            self.pipeline.popleft()
            is_whole = True
        last = self.pipeline[0][0] if self.pipeline else self._answering
        if last is None or last.response_complete or (not is_whole and not last.response_started):
            self._answer(error)
            if last is not None:
                last.disconnected = True
                last.message_event.set()
        elif is_whole:
            last.keep_alive = False
        else:
            self.transport.close()

    def _answer(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(error.body) + error.body)
        self._linger()

    def _close(self) -> None:
        """Closes the connection behind its last answer, which may have come before all of the body."""
        if self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Closes the connection when the client has had time to read its answer."""
        self._is_deaf, self._beside_body = True, 0
        if self.transport.is_closing() or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()
            self._head_has_come()
            self._late = self.loop.call_later(_LINGER_S, self.transport.close)


class _Last:
    """The transport of a connection's last answer."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def _too_large() -> ApiError:
    return ApiError(
        431,
        f"the request has more than {_MOST_BYTES >> 10} KiB beside its body, or more than {_MOST_HEADERS} headers",
        code="head_too_large",
    )


def _write_chunk(cycle: RequestResponseCycle, body: bytes) -> bool:
    """A WriteChunk (flow/writer.py): what `cycle.send` does with a part of a body that was begun, for less."""
    is_open = cycle.response_started and not cycle.response_complete and not cycle.disconnected
    if not is_open or not cycle.chunked_encoding or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
