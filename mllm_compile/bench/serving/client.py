"""One request to an OpenAI server, and when each of its chunks came.

Over asyncio's streams and httptools' parser: a client that costs more than the server would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from mllm_compile.bench import BenchmarkError

_PART = 1 << 16
_NEWS = re.compile(rb'"text": ?"[^"]|"token_ids": ?\[\d')  # of a chunk with text, or with tokens that have none
_BAD = (OSError, asyncio.IncompleteReadError, httptools.HttpParserError, ValueError)


@dataclass
class Seen:
    """One request as its client saw it; times are time.perf_counter().

    Attributes:
        started: when it was sent, on a connection that was open.
        chunks: when each chunk with text or tokens came.
        output_tokens, prompt_tokens: as the server's usage says.
        error: what went wrong; None: it was answered.
    """

    started: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None


class _Response:
    """Takes what the parser finds."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


class _Arrivals(asyncio.StreamReaderProtocol):
    """Notes when bytes came: the task that reads them is woken a little later."""

    last_s = 0.0

    def data_received(self, data: bytes) -> None:
        self.last_s = time.perf_counter()
        super().data_received(data)


class Server:
    """The server that is measured.

    Args:
        url: its root, or its `/v1`.
        api_key: sent where it is given.

    Raises:
        BenchmarkError: the URL is malformed.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        refusal = BenchmarkError(f"{url} is no URL of a server; expected such as http://127.0.0.1:8000")
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:  # of a port that is no number, or a bracket that is not closed
            raise refusal from None
        if not host or parts.scheme not in ("http", "https"):
            raise refusal
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._key = f"authorization: Bearer {api_key}\r\n" if api_key else ""

    async def get(self, path: str) -> Any:
        """The JSON at a path.

        Raises:
            BenchmarkError: it has no model.
        """
        try:
            status, body = await self._ask("GET", path, b"", None)
            return _json_of(status, body)
        except _BAD as error:
            raise BenchmarkError(
                f"{self._host}:{self._port}{path}: no answer ({error or type(error).__name__}). Start a server there "
                "(mllm-compile serve MODEL), or give the model in place of the URL."
            ) from None

    async def stream(self, path: str, fields: dict[str, Any], at: float | None = None) -> Seen:
        """Runs one streamed request to its end.

        Time counts from the moment at which the request is sent: its body is made, and its connection opened, before.
        These are the client's own work, and clients in use keep their connections.

        Args:
            at: when it is sent, as time.perf_counter(); None: at once.
        """
        seen = Seen(time.perf_counter())
        try:
            status, body = await self._ask("POST", path, json.dumps(fields).encode(), seen, at)
            seen.ended = time.perf_counter()
            if status != 200:
                seen.error = f"{status} {bytes(body[:200]).decode(errors='replace')}"
            else:
                _read_usage(seen, body)
        except _BAD as error:
            seen.error = str(error) or type(error).__name__
        seen.ended = seen.ended or time.perf_counter()
        return seen

    async def _ask(
        self, method: str, path: str, body: bytes, seen: Seen | None, at: float | None = None
    ) -> tuple[int, bytearray]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_PART)
        arrivals = _Arrivals(reader)
        transport, _ = await loop.create_connection(lambda: arrivals, self._host, self._port, ssl=self._tls)
        writer = asyncio.StreamWriter(transport, arrivals, reader, loop)
        try:
            head = (
                f"{method} {self._root}{path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{self._key}\r\n"
            )
            data = head.encode() + body
            if at is not None:
                await asyncio.sleep(at - time.perf_counter())
            if seen is not None:
                seen.started = time.perf_counter()
            writer.write(data)
            response = _Response()
            parser = httptools.HttpResponseParser(response)
            while not response.is_complete:
                part = await reader.read(_PART)
                if not part:
                    raise ConnectionError("the server closed the connection in the middle of an answer")
                before = len(response.body)
                parser.feed_data(part)
                if seen is not None and _NEWS.search(response.body, before):
                    seen.chunks.append(arrivals.last_s)
            return parser.get_status_code(), response.body
        finally:
            writer.close()


def _json_of(status: int, body: bytearray) -> Any:
    if status != 200:
        raise ValueError(f"status {status}")
    return json.loads(body)


def _read_usage(seen: Seen, body: bytearray) -> None:
    """Takes the counts of the last chunk that has them.

    Raises:
        ValueError: the stream ends with an error, or is malformed.
    """
    for line in reversed(bytes(body).split(b"\n\n")):
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise ValueError(str(chunk["error"].get("message", chunk["error"])))
        if chunk.get("usage"):
            seen.output_tokens = chunk["usage"]["completion_tokens"]
            seen.prompt_tokens = chunk["usage"]["prompt_tokens"]
            return
    raise ValueError("the stream has no usage: the server does not know stream_options.include_usage")
