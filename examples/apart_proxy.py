"""Prefill apart from decode: one address before prefill and decode engines, by Python's own library alone.

    export MLLM_KV_SECRET=$(openssl rand -hex 32)
    mllm-compile serve MODEL --port 8100 --kv-offloading-size 16 --kv-transfer-config \
        '{"kv_connector": "PeerConnector", "kv_role": "kv_producer"}'
    mllm-compile serve MODEL --port 8200 --kv-offloading-size 16 --kv-transfer-config \
        '{"kv_connector": "PeerConnector", "kv_role": "kv_consumer"}'
    python examples/apart_proxy.py --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200 --port 8000

A request goes to a prefill engine first, for one token. Its answer says where the pages are; with that the request goes
to a decode engine, whose answer is passed on as it comes. An engine that does not answer is passed over: without a
prefill engine the decode engine computes the prompt.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

APART = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
NOT_OF_PREFILL = ("stream_options", "stream_interval", "min_tokens", "max_completion_tokens", "prompt_logprobs", "n")
MOST_BYTES = 16 << 20  # of a body
PASSED = ("authorization", "content-type", "x-request-id", "x-session-id")
TIMEOUT_S = 600.0


class Engines:
    """Engines of one kind, each taken in turn."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses, self._next = addresses, itertools.count()

    def in_turn(self) -> Iterator[str]:
        """All of them, another one first each time."""
        first = next(self._next) % len(self._addresses)
        yield from self._addresses[first:] + self._addresses[:first]


class Proxy(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S
    prefill: Engines
    decode: Engines

    def do_GET(self) -> None:
        self.pass_on(b"")

    def do_POST(self) -> None:
        size = self.headers.get("content-length", "")
        if not (size.isdecimal() and len(size) < 20 and int(size) <= MOST_BYTES):
            self.close_connection = True  # what follows is its body, and no request
            self.say(413, {"error": {"message": f"a body has a content-length of at most {MOST_BYTES}"}})
            return
        body = self.rfile.read(int(size))
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        if self.path in APART and isinstance(fields, dict):
            body = json.dumps(fields | {"kv_transfer_params": self.prefilled(fields)}).encode()
        self.pass_on(body)

    def prefilled(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Where the pages of a request's prompt are; None: no prefill engine has computed it."""
        asked = {name: value for name, value in fields.items() if name not in NOT_OF_PREFILL} | ONE_TOKEN
        for address in self.prefill.in_turn():
            try:
                answer = self.ask(address, json.dumps(asked).encode())
                told = json.loads(answer.read()) if answer.status == 200 else {}
                answer.close()
            except (OSError, http.client.HTTPException, ValueError):
                continue
            return told.get("kv_transfer_params")
        return None

    def pass_on(self, body: bytes) -> None:
        """Passes a request to a decode engine, and its answer back as it comes."""
        for address in self.decode.in_turn():
            try:
                answer = self.ask(address, body)
            except (OSError, http.client.HTTPException):
                continue
            self.tell(answer)
            return
        self.say(503, {"error": {"message": "no decode engine answers"}})

    def ask(self, address: str, body: bytes) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED}
        connection.request(self.command, self.path, body or None, headers | {"connection": "close"})
        return connection.getresponse()

    def tell(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        length = answer.getheader("content-length")
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        if length is None:
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            while part := answer.read1(1 << 16):
                self.wfile.write(part if length is not None else b"%x\r\n%s\r\n" % (len(part), part))
            if length is None:
                self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):  # one side has left: the other one sees no end
            self.close_connection = True
        finally:
            answer.close()

    def say(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close" if self.close_connection else "keep-alive")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prefill", action="append", required=True, help="HOST:PORT, once or several times")
    parser.add_argument("--decode", action="append", required=True, help="likewise")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    Proxy.prefill, Proxy.decode = Engines(options.prefill), Engines(options.decode)
    server = ThreadingHTTPServer((options.host, options.port), Proxy)
    print(f"listening at http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
