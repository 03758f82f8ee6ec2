"""A replica of Ray Serve: `mllm-compile serve` on a port of its own, whose answers it relays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mllm_compile.process.group import ProcessGroup
from mllm_compile.server.replicas.keys import Keys

_OF_CONNECTIONS = ("content-length", "transfer-encoding", "connection", "host", "date")
_LAST_LINES = 20


@dataclass
class Asked:
    """A request on its way to a replica.

    Attributes:
        path: quoted, with the query.
        keys: what the ingress's router chooses by, and nobody else: they stay there.
    """

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    keys: Keys = field(default_factory=Keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keys": Keys()}


class Replica:
    """One engine with its server."""

    def __init__(self, model: str, options: Sequence[str], folders: Sequence[str]) -> None:
        """Starts it, and waits until it is ready.

        Args:
            folders: where modules are found, as by the process that has deployed it.

        Raises:
            RuntimeError: it does not start; its last lines say why.
        """
        command = [sys.executable, "-P", "-m", "mllm_compile", "serve", model, *options]
        command += ["--host", "127.0.0.1", "--port", "0"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, sys.path)])}
        self._server = ProcessGroup(
            command, stderr=subprocess.PIPE, text=True, errors="replace", env=environment, stdin=subprocess.DEVNULL
        )
        self._url = self._ready_at()
        self._session: Any = None
        threading.Thread(target=self._pass_log_on, daemon=True).start()

    def _ready_at(self) -> str:
        """The server's address, once it is ready."""
        url, said = "", list[str]()
        for line in self._server.stderr or ():
            said = [*said[1 - _LAST_LINES :], line.rstrip()]
            found = re.search(r"listening at (http://\S+),", line)
            url = found[1] if found else url
            if url and line.startswith("  ready"):
                return url
        code = self._server.wait()
        raise RuntimeError(f"mllm-compile serve ended with code {code} before it was ready: {' / '.join(said)}")

    def _pass_log_on(self) -> None:
        """Runs until the server ends, and ends the replica with it: Ray then sends it nothing, and starts another."""
        for line in self._server.stderr or ():
            print(line, end="", file=sys.stderr)
        self._server.wait()
        os._exit(1)

    def check_health(self) -> None:
        """Ray asks now and then.

        Raises:
            RuntimeError: the server has ended.
        """
        if (code := self._server.poll()) is not None:
            raise RuntimeError(f"mllm-compile serve ended with code {code}")

    async def relay(self, asked: Asked) -> AsyncIterator[Any]:
        """Yields status and headers, then the bytes of the answer."""
        import aiohttp

        if self._session is None:
            timeout, no_limit = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=no_limit, auto_decompress=False)
        async with self._session.request(
            asked.method, self._url + asked.path, data=asked.body, headers=asked.headers, allow_redirects=False
        ) as answer:
            yield answer.status, passed_on(answer.headers.items())
            async for piece in answer.content.iter_any():
                yield piece


def passed_on(headers: Any) -> list[tuple[str, str]]:
    """The headers that are of a message, and not of the connection that brought it."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_CONNECTIONS]
