"""A connection of the front: bounds what it may send beside bodies, and writes chunks of answers in one call.

Bounded are the size of a request's head, and the time that it takes to come.

The parser of uvicorn's protocol keeps a header until it is whole, and copies it with each part that comes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mllm_compile.server.flow.writer import CHUNKS

_MOST_BYTES = 256 << 10  # of a request, beside its body: head, trailers, and the frames of chunks
_HEAD_S = 75.0  # as long as a connection may be idle


class Connection(HttpToolsProtocol):
    """A connection with such bounds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._beside_body = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > _MOST_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.send_400_response(f"The request has more than {_MOST_BYTES >> 10} KiB beside its body.")
            else:
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_has_come()
        super().on_headers_complete()
        # The request's task has not begun yet.
        self.scope["extensions"] = {CHUNKS: {"write": partial(_write_chunk, self.cycle)}}

    def on_body(self, body: bytes) -> None:
        self._beside_body -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._beside_body = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_has_come()
        self._late = self.loop.call_later(_HEAD_S, self.transport.close)

    def _head_has_come(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _write_chunk(cycle: RequestResponseCycle, body: bytes) -> bool:
    """A WriteChunk (flow/writer.py): what `cycle.send` does with a part of a body that was begun, for less."""
    is_open = cycle.response_started and not cycle.response_complete and not cycle.disconnected
    if not is_open or not cycle.chunked_encoding or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
