"""Memory that requests hold in a server's front, and an image's waits: all end with the request."""

from __future__ import annotations

import base64
import json
import random
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hang_guard import HANG_S
from tests.media.cases import file_of, pixels_of
from tests.server.harness import Answer, Server, eventually, fake_server

pytest.importorskip("PIL")
MIB = 1 << 20
SETTINGS = {"images": {}, "delay_s": 0.02, "limits": {"max_model_len": 4096, "num_pages": 4096}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings=SETTINGS) as server:
        assert ask(server, file_of(pixels_of(1, 32, 48))).status == 200
        yield server


def image_chat(data: bytes, **fields: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"max_tokens": 2, "temperature": 0, "messages": [{"role": "user", "content": content}], **fields}


def ask(server: Server, data: bytes, **fields: Any) -> Answer:
    return server.post("/v1/chat/completions", image_chat(data, **fields))


def resident(server: Server) -> int:
    """Bytes of the front's memory."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[1]) << 10


def fax(width: int, height: int, data: bytes) -> bytes:
    """A TIFF in a coding of fax machines: for each row that is broken libtiff writes a line to standard error."""
    tags = [(256, 4, width), (257, 4, height), (258, 3, 1), (259, 3, 3), (262, 3, 0)]
    tags += [(273, 4, 0), (277, 3, 1), (278, 4, height), (279, 4, len(data))]
    begin = 8 + 2 + 12 * len(tags) + 4
    entries = (struct.pack("<HHII", tag, kind, 1, begin if tag == 273 else value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(entries) + struct.pack("<I", 0) + data


def test_broken_images_that_make_a_library_talk_hold_up_nobody(server):
    broken = fax(1000, 4000, random.Random(1).randbytes(60_000))
    assert ask(server, broken).status in (200, 400)
    assert ask(server, file_of(pixels_of(1, 32, 48))).status == 200


def test_bodies_of_clients_that_have_left_are_not_kept(server):
    before = resident(server)
    body = json.dumps(image_chat(b"\x89PNG" + bytes(8 * MIB))).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for number in range(24):
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
            client.sendall(head + body)
            if number % 2:  # the others have left before their bodies were parsed
                assert client.recv(12) == b"HTTP/1.1 400"
    eventually(lambda: server.figure("mllm:requests_waiting") == 0)
    assert resident(server) - before < 120 * MIB, "of 24 bodies with 11 MiB each"


def test_what_no_answer_depends_on_is_not_kept(server):
    before = resident(server)
    lists = b"[" + b",".join([b"[]"] * 5_000_000) + b"]"
    body = b'{"prompt":[5],"max_tokens":4000,"ignore_eos":true,"stream":true,"metadata":' + lists + b"}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    clients = []
    for _ in range(4):
        clients.append(socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S))
        clients[-1].sendall(head + body)
        assert clients[-1].recv(12) == b"HTTP/1.1 200"
    grown = resident(server) - before
    for client in clients:
        client.close()
    assert grown < 150 * MIB, "of 4 bodies with 15 MiB each, which would be 400 MiB each"


def test_a_body_of_many_values_is_refused_without_them_being_kept(server):
    before = resident(server)
    lists = b"[" + b",".join([b"[]"] * 2_000_000) + b"]"
    for field in ("stop", "logit_bias", "tools", "response_format", "chat_template_kwargs"):
        answer = server.post(
            "/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"%b":%b}' % (field.encode(), lists)
        )
        assert answer.status == 400, field
    for path, field in (("chat/completions", b"messages"), ("messages", b"messages"), ("responses", b"input")):
        parts = b'{"%b":[{"role":"user","content":%b}]}' % (field, lists)
        answer = server.post(f"/v1/{path}", parts)
        assert (answer.status, "messages and parts" in answer.error["message"]) == (400, True), path
    many = b"{" + b",".join(b'"k%d":1' % number for number in range(200_000)) + b"}"
    assert "200000 fields; expected at most 1000" in server.post("/v1/completions", many).error["message"]
    assert server.complete(**{"k" * 3_000_000: 1}).headers["x-mllm-ignored"] == "k" * 64
    assert resident(server) - before < 400 * MIB
