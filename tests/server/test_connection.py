"""Limits of a connection before authentication: bytes beside a body, and time."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvicorn

from mllm_compile.server import connection
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.http import Bodies
from tests.hang_guard import HANG_S
from tests.server.harness import fake_server

_PART = 1 << 16


@pytest.fixture(scope="module")
def server():
    with fake_server({"api_keys": ["secret"]}) as server:
        yield server


def _sent(server, start: bytes, part: bytes) -> tuple[int, bytes]:
    """Sends the same part until the server ends it; returns the parts that it took, and what it said."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
        client.sendall(start)
        count, said = 0, b""
        try:
            while count < 1000:
                client.sendall(part)
                count += 1
            client.shutdown(socket.SHUT_WR)
        except OSError:  # it has closed the connection
            pass
        try:
            while data := client.recv(_PART):
                said += data
        except OSError:
            pass
    return count, said


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"a" * _PART),
        (b"GET /health HTTP/1.1\r\n", b"x: a\r\n" * (_PART // 6)),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * _PART),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * _PART),
    ],
    ids=["a header", "headers", "a trailer", "an extension of a chunk"],
)
def test_a_head_or_trailer_without_an_end_is_cut_off(server, start, part):
    count, _ = _sent(server, start, part)
    assert count < 1000
    assert server.get("/health").status == 200


def test_trailers_are_no_headers(server):
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
        client.sendall(chunked + b"authorization: Bearer secret\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 401"


def test_a_body_is_not_counted_as_head(server):
    key = {"authorization": "Bearer secret"}
    for size in (1 << 20, 8 << 20):
        answer = server.post("/v1/completions", b" " * size + b'{"prompt": "x", "max_tokens": 1}', headers=key)
        assert answer.status == 200


def test_many_requests_on_one_connection_are_not_counted_together(server):
    request = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 4000 + b"\r\n\r\n"
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=HANG_S) as client, client.makefile("rb") as answers:
        for _ in range(200):
            client.sendall(request)
            assert answers.readline().startswith(b"HTTP/1.1 200")
            while answers.readline().strip():
                pass
            assert answers.read(len(b'{"state":"ready"}'))


def test_a_head_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "_HEAD_S", 0.01)

    async def closes(sent: bytes) -> bytes:
        config = uvicorn.Config(_hello, http=connection.Connection, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.startup([listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(sent)
        said = await reader.read()
        writer.close()
        await server.shutdown([listener])
        return said

    for sent in (b"", b"GET / HTTP/1.1\r\nhost:"):
        assert asyncio.run(asyncio.wait_for(closes(sent), HANG_S)) == b""


async def _hello(scope, receive, send) -> None:
    raise AssertionError("no request has come")


def test_a_body_that_does_not_end_gives_its_room_back():
    async def run() -> tuple[ApiError, int]:
        bodies, memory = Bodies(1 << 20, most_s=0.01), Memory()
        parts = [{"type": "http.request", "body": b"x" * 1000, "more_body": True}]

        async def receive():
            return parts.pop() if parts else await asyncio.Event().wait()

        with pytest.raises(ApiError) as refused, memory.share() as share:
            await asyncio.wait_for(bodies.read(receive, share), HANG_S)
        return refused.value, memory.held

    error, held = asyncio.run(run())
    assert (error.status, error.code, held) == (408, "request_timeout", 0)
    assert "has not come within 0.01 s" in error.message
