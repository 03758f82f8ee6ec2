"""Connections that hurt others, or themselves, of a server: each ends in its own answers, and others get theirs."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest

from tests.hang_guard import HANG_S
from tests.server.harness import Server, eventually, fake_server

LONG = {"limits": {"max_model_len": 4096, "num_pages": 4096}, "delay_s": 0.005}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings=LONG) as server:
        yield server
        assert "Traceback" not in server.said


def request(body: bytes | None = None, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """The bytes of a request; a GET where it has no body."""
    length = [] if body is None else [f"content-length: {len(body)}"]
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/{version}", "host: x", *headers, *length]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


def fields(**changes) -> bytes:
    return json.dumps({"prompt": "def", "max_tokens": 1, "temperature": 0, **changes}).encode()


ENDLESS = fields(max_tokens=4000, ignore_eos=True)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)


def answers(client: socket.socket) -> list[tuple[int, bytes]]:
    """Status and body of all answers that come until the server closes the connection."""
    with client, client.makefile("rb") as stream:
        found = []
        while line := stream.readline():
            status, length, is_chunked = int(line.split()[1]), 0, False
            while (header := stream.readline().strip().lower()) != b"":
                name, _, value = header.partition(b": ")
                length = int(value) if name == b"content-length" else length
                is_chunked |= name == b"transfer-encoding"
            body = b""
            while is_chunked and (size := int(stream.readline(), 16)):
                body += stream.read(size + 2)[:-2]
            body += stream.readline().strip() if is_chunked else stream.read(length)
            found.append((status, body))
        return found


def say(server: Server, *parts: bytes, shuts: bool = True) -> list[tuple[int, bytes]]:
    """The server's answer to these bytes, each sent by itself; then the client closes its side."""
    client = connect(server)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for part in parts:
        client.sendall(part)
    if shuts:
        client.shutdown(socket.SHUT_WR)
    return answers(client)


UPGRADES = [
    ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
    ("connection: upgrade", "upgrade: websocket", "sec-websocket-key: x", "sec-websocket-version: 13"),
    ("Connection: Upgrade", "UPGRADE: foo", "connection: close"),
]


@pytest.mark.parametrize("headers", UPGRADES, ids=["h2c", "websocket", "anything"])
@pytest.mark.parametrize("cut", [0, 40, -30, -1], ids=["whole", "in the head", "in the body", "before its end"])
def test_a_request_with_upgrade_is_one_request_with_its_body(server, headers, cut):
    whole = request(fields(), *headers)
    parts = [whole[:cut], whole[cut:]] if cut else [whole]
    ((status, body),) = say(server, *parts)
    assert (status, json.loads(body)["object"]) == (200, "text_completion")
    hidden = request(path="/v1/models")
    assert say(server, *parts[:-1], parts[-1] + hidden)[0][0] == 200
    ((status, body),) = say(server, request(b"", *headers)[:-5] + f"{len(hidden)}\r\n\r\n".encode(), hidden)
    assert (status, b'"list"' in body) == (400, False), "a body is no further request"


def test_an_upgrade_with_a_body_in_chunks_is_one_request(server):
    body = fields()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = request(b"", *UPGRADES[0], "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    assert [status for status, _ in say(server, head, chunks)] == [200]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"CONNECT a.example:80 HTTP/1.1\r\nhost: a.example\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (request(fields(), "transfer-encoding: chunked"), 400),
        (request(fields(), "content-length: 3"), 400),
        (request(fields(), "transfer-encoding: chunked", path="/health"), 400),
        (request(None, "x: a\r\n b"), 400),
        (request(None, "x : a"), 400),
        (request(None, version="7.1"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (request(None, "a: " + "b" * 300_000), 431),
        (request(None, *["a: b"] * 2000), 431),
        (request(None, path="/" + "b" * 300_000), 431),
    ],
)
def test_what_is_no_request_or_too_large_is_told_and_nothing_behind_it_is_read(server, sent, status):
    ((said, body),) = say(server, sent + request(path="/health"))
    assert (said, json.loads(body)["error"]["type"]) == (
        status,
        "invalid_request_error" if status < 500 else "server_error",
    )


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_body_that_is_too_large_is_told_while_it_comes(server, connection):
    assert [status for status, _ in say(server, request(b"[" * (18 << 20), f"connection: {connection}"))] == [413]


def test_a_head_is_bounded_as_it_comes_and_a_smaller_one_is_taken(server):
    for size in (250_000, 300_000, 600_000):
        ((status, _),) = say(server, request(None, "connection: close", "a: " + "b" * size, path="/version"))
        assert status == (200 if size < 256 << 10 else 431), size


def test_what_follows_an_answer_that_is_on_its_way_does_not_break_it(server):
    found = say(server, request(fields(max_tokens=40, ignore_eos=True, stream=True)) + b"\0 nonsense\r\n\r\n")
    assert [status for status, _ in found] == [200]
    assert found[0][1].endswith(b"data: [DONE]\n\n")
    broken = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nnonsense"
    found = say(server, request(fields(max_tokens=40, stream=True)) + broken)
    assert [status for status, _ in found] == [200]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_shuts_its_sending_side_gets_its_answer(server, is_stream):
    body = fields(max_tokens=300, ignore_eos=True, stream=is_stream)
    found = [(status, body) for status, body in say(server, request(body, "connection: close")) if status != 100]
    assert [status for status, _ in found] == [200]
    assert b"length" in found[0][1]


def ends(server: Server) -> int:
    """The answers that nobody has waited for."""
    line = re.search(
        rb'^mllm:completions_total{finished_reason="abort"} (\S+)$', server.get("/metrics").body, re.MULTILINE
    )
    return int(float(line[1])) if line else 0


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_has_left_is_told_from_one_that_reads(server, version, is_stream):
    client, before = connect(server), ends(server)
    client.sendall(request(fields(max_tokens=4000, ignore_eos=True, stream=is_stream), version=version))
    eventually(lambda: server.figure("mllm:connections_generating") == 1)
    client.close()
    eventually(lambda: ends(server) == before + 1)


def test_requests_that_are_sent_ahead_end_with_their_client(server):
    client, before = connect(server), ends(server)
    client.sendall(request(ENDLESS) + request(ENDLESS) + request(path="/health"))
    eventually(lambda: server.figure("mllm:connections_generating") == 1)
    client.close()
    eventually(lambda: ends(server) == before + 1)
    assert server.figure("mllm:connections_generating") == 0, "the second one never begins"


def test_requests_ahead_of_answers_are_answered_in_turn_up_to_a_bound(server):
    found = say(server, request(fields()) + request(path="/health") * 20)
    assert [status for status, _ in found] == [200] * 21
    found = say(server, request(fields(max_tokens=50)) + request(path="/health") * 3000, shuts=False)
    assert {status for status, _ in found} == {200}
    assert len(found) <= 40


def test_a_body_that_is_awaited_is_asked_for_once(server):
    body = fields()
    client = connect(server)
    client.sendall(request(body, "expect: 100-continue")[: -len(body)])
    assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(body)
    client.shutdown(socket.SHUT_WR)
    assert [status for status, _ in answers(client)] == [200]


def test_many_connections_that_say_nothing_leave_room_for_others(server):
    silent = [connect(server) for _ in range(500)]
    for number, client in enumerate(silent):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"[: 40 + number % 40])
    assert server.complete().status == 200
    for client in silent:
        client.close()
