"""Servers in processes of their own, and ways to talk to them that no client library offers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hang_guard import HANG_S, until

ROOT = Path(__file__).parents[2]


class Answer:
    """A whole HTTP answer."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream; its end is None."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [None if line == "[DONE]" else json.loads(line) for line in lines]


class Server:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.port = 0

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = HANG_S,
    ) -> Answer:
        """One request on a connection of its own; `body` is JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.ask("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Answer:
        return self.ask("POST", path, body, **options)

    def complete(self, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": "def", "max_tokens": 4, **fields})

    def open(self, path: str, body: Any) -> socket.socket:
        """A connection with a sent request and nothing read yet."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)
        connection.sendall(head.encode() + data)
        return connection

    def figure(self, name: str) -> float:
        """A figure of /metrics, without labels."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").body.decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def engine_pids(self) -> list[int]:
        """The engine's processes, its leader first."""
        pids = []
        own = Path(f"/proc/{self.process.pid}/cmdline").read_bytes().split(b"\0")
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            is_fork = command == own
            if parent == self.process.pid and (is_fork or b"tests.server.fake_backend" in command):
                pids.append(int(folder.name))
        return pids

    def is_ready(self) -> bool:
        return self.get("/ready").status == 200

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(HANG_S)


def eventually(condition: Callable[[], object], what: str = "what a test waits for") -> None:
    """Returns when `condition` holds; asks less often than hang_guard's, as each question costs the server time."""
    until(lambda: condition() or time.sleep(0.03), what)


@contextmanager
def fake_server(
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    waits: bool = True,
) -> Iterator[Server]:
    """A server over a fake engine.

    Args:
        options: of ServeOptions.
        settings: of fake_backend.py.
        waits: until it is ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "tests.server.fake_front",
            json.dumps({"port": 0, "served_names": ["fake"], **(options or {})}),
            json.dumps(settings or {}),
        ]  # fmt: skip
        with running(command, Path(folder) / "log", environment, waits=waits) as server:
            yield server


@contextmanager
def running(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None, *, waits: bool = True
) -> Iterator[Server]:
    """A server by its command."""
    with log.open("wb") as output:
        # A server that is killed leaves its temporary folder: here it goes with the test's.
        variables = {**os.environ, "TMPDIR": str(log.parent), **(environment or {})}
        process = subprocess.Popen(command, cwd=ROOT, stderr=output, stdout=subprocess.DEVNULL, env=variables)
        server = Server(process, log)
        try:
            eventually(lambda: "listening at" in server.said or process.poll() is not None, "the server listens")
            found = re.search(r"listening at (?:https?://[^ ,]*:(\d+)|/)", server.said)
            assert found, server.said
            server.port = int(found[1] or 0)  # a Unix socket has none
            if waits:
                eventually(lambda: server.is_ready() or process.poll() is not None, "the server is ready")
                assert process.poll() is None, server.said
            yield server
        finally:
            process.kill()
            process.wait()
