"""Several engines behind one address, by Ray Serve: prompts that begin alike go where their KV is cached.

    python examples/ray_serve.py CONFIG.yaml --replicas 2

Each replica runs `mllm-compile serve` on a port of its own; the ingress picks one and passes bytes on. Prompts that
begin alike go to the same replica, where their KV is cached, by the router of Ray, unless that one has much more to do.
A replica ends with its server, and Ray starts another.

Needs the package `ray[serve]`, and the extra `serve`. The router is one of Ray's internal modules: of another
version of Ray than 2.60 it may have another name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import StreamingResponse

from mllm_compile.process.group import ProcessGroup

ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
IMBALANCE = 8  # requests that a replica may have more than another before prompts go to that one
ONGOING = 1024
TRIES = 5
HOP = ("content-length", "transfer-encoding", "connection", "host", "date")


@dataclass
class Asked:
    """A request on its way; the router reads `prompt`."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    prompt: str


@serve.deployment(
    max_ongoing_requests=ONGOING,
    request_router_config=RequestRouterConfig(
        request_router_class=ROUTER, request_router_kwargs={"imbalanced_threshold": IMBALANCE}
    ),
)
class Replica:
    """One engine with its server."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "mllm_compile", "serve", model, "--port", "0"]
        self._server = ProcessGroup(command, stderr=subprocess.PIPE, text=True, errors="replace")
        self._url = self._listening()
        self._session: aiohttp.ClientSession | None = None

    def _listening(self) -> str:
        """The server's address, once it is ready."""
        url = None
        for line in self._server.stderr:
            found = re.search(r"listening at (http://\S+),", line)
            url = found[1] if found else url
            if line.startswith("  ready"):
                threading.Thread(target=self._pass_log_on, daemon=True).start()
                return url
        raise RuntimeError(f"the server does not start (exit code {self._server.wait()})")

    def _pass_log_on(self) -> None:
        """Runs until the server ends, and ends the replica with it: Ray then sends it nothing, and starts another."""
        for line in self._server.stderr:
            print(line, end="", file=sys.stderr)
        self._server.wait()
        os._exit(1)

    async def relay(self, asked: Asked) -> AsyncIterator[Any]:
        """Yields status and headers, then the bytes of the answer."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        url = self._url + asked.path
        async with self._session.request(asked.method, url, data=asked.body, headers=asked.headers) as answer:
            yield answer.status, {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            async for piece in answer.content.iter_any():
                yield piece


@serve.deployment(max_ongoing_requests=ONGOING)
class Ingress:
    """Takes every request, and passes it on."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        body = await request.body()
        asked = Asked(request.method, request.url.path, headers, body, _prompt_of(body))
        for _ in range(TRIES - 1):
            with contextlib.suppress(RayError):  # before its first piece nothing is lost: another replica may answer
                return await self._answer(asked)
        return await self._answer(asked)

    async def _answer(self, asked: Asked) -> StreamingResponse:
        pieces = self._replicas.relay.remote(asked)
        status, headers = await anext(pieces)
        return StreamingResponse(pieces, status, headers)


def _prompt_of(body: bytes) -> str:
    """The text whose beginning is compared among prompts."""
    try:
        given = json.loads(body)
        prompt = given.get("prompt") or given.get("messages") or given.get("input") or ""
    except (ValueError, AttributeError):
        return ""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def start(model: str, replicas: int, port: int, **actor: Any) -> None:
    """Serves a model by so many replicas; `actor` are options of each, such as num_gpus."""
    serve.start(http_options={"port": port})
    serve.run(_application(model, replicas, actor), route_prefix="/")


def application(arguments: dict[str, str]) -> serve.Application:
    """The application of a Serve config, such as clusters/ray_service.yaml."""
    return _application(arguments["model"], int(arguments["replicas"]), {"num_gpus": float(arguments["gpus"])})


def _application(model: str, replicas: int, actor: dict[str, Any]) -> serve.Application:
    return Ingress.bind(Replica.options(num_replicas=replicas, ray_actor_options=actor).bind(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--gpus", type=float, default=1, help="of each replica; 0 on a CPU")
    asked = parser.parse_args()
    ray.init(include_dashboard=False)
    start(asked.model, asked.replicas, asked.port, num_gpus=asked.gpus)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(1)
    serve.shutdown()


if __name__ == "__main__":
    main()
