"""The proxy before prefill and decode engines, without engines; tests/e2e/test_apart_features.py has it with them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from examples.apart_proxy import MOST_BYTES, Engines, Proxy


@pytest.fixture
def port() -> Iterator[int]:
    """A proxy whose engines do not answer."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    handler = type("Alone", (Proxy,), {"prefill": Engines([nobody]), "decode": Engines([nobody])})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def said(port: int, head: str, body: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{head}\r\n\r\n".encode() + body)
        data = b""
        while part := client.recv(1 << 16):
            data += part
        return data


@pytest.mark.parametrize("size", [str(MOST_BYTES + 1), "9" * 5000, "-1", "a"])
def test_a_body_of_no_good_length_is_refused_and_not_read_as_a_request(port: int, size: str) -> None:
    answer = said(port, f"content-length: {size}", b"GET /secret HTTP/1.1\r\nhost: a\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_engines_that_do_not_answer_are_told(port: int) -> None:
    answer = said(port, "connection: close\r\ncontent-length: 2", b"{}")
    assert answer.startswith(b"HTTP/1.1 503 ") and b"no decode engine answers" in answer
