"""The clients of a load, in processes of their own: one that shares a core with the rest measures itself.

Run as a module it is one client. A first line of standard input has its share of the requests. Once it has reported
that it is ready, a second line has the time to begin. Its measurements go to standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import uvloop

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.serving.client import Seen, Server
from mllm_compile.process import child_python
from mllm_compile.process.group import ProcessGroup

_HEAD_START_S = 0.5  # all have read the time to begin by then, and have their first connections
_CONNECT_S = 0.4  # so long before its time a request begins to connect
_END_S = 10.0

Arrival = tuple[float, dict[str, Any]]  # seconds after the begin, the fields of the request


def send_all(
    url: str, api_key: str | None, path: str, arrivals: Sequence[Arrival], clients: int, concurrency: int | None
) -> tuple[float, list[Seen]]:
    """Sends requests from so many processes, and waits for their answers.

    Returns:
        When the load began, as time.perf_counter(), and what was seen of each request.

    Raises:
        BenchmarkError: a client has ended early.
    """
    command = child_python.command(__name__)
    with contextlib.ExitStack() as ends:
        processes = []
        for index in range(clients):
            process = ProcessGroup(
                command, env=child_python.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            ends.callback(_end, process)
            share = arrivals[index::clients]
            bound = len(share) if concurrency is None else (concurrency + clients - 1 - index) // clients
            _tell(process, [url, api_key, path, share, bound])
            processes.append(process)
        for process in processes:
            _hear(process)
        begin = time.perf_counter() + _HEAD_START_S  # the same clock in all processes
        for process in processes:
            _tell(process, begin)
        return begin, [Seen(**one) for process in processes for one in _hear(process)]


def _tell(process: ProcessGroup, message: Any) -> None:
    assert process.stdin is not None, "a pipe"
    with contextlib.suppress(BrokenPipeError):  # one that has ended is met when it is to answer
        print(json.dumps(message), file=process.stdin, flush=True)


def _hear(process: ProcessGroup) -> Any:
    assert process.stdout is not None, "a pipe"
    line = process.stdout.readline()
    if not line:
        raise BenchmarkError(f"a client has ended early, with exit code {process.wait()}; what it said is above")
    return json.loads(line)


def _end(process: ProcessGroup) -> None:
    process.kill_group()
    process.wait(_END_S)


async def _send(server: Server, path: str, arrivals: Sequence[Arrival], bound: int, begin: float) -> list[Seen]:
    free = asyncio.Semaphore(bound)

    async def one(after: float, fields: dict[str, Any]) -> Seen:
        at = begin + after
        await asyncio.sleep(at - _CONNECT_S - time.perf_counter())
        async with free:
            return await server.stream(path, fields, at)

    return await asyncio.gather(*(one(after, fields) for after, fields in arrivals))


def main() -> None:
    """One client."""
    # With PYTHONUNBUFFERED sys.stdout writes to the pipe once, and drops what a short write leaves.
    with open(sys.stdout.fileno(), "w", closefd=False) as answers:
        url, api_key, path, arrivals, bound = json.loads(sys.stdin.readline())
        server = Server(url, api_key)
        print(json.dumps("ready"), file=answers, flush=True)
        begin = json.loads(sys.stdin.readline())
        seen = uvloop.run(_send(server, path, arrivals, bound, begin))
        print(json.dumps([asdict(one) for one in seen]), file=answers, flush=True)


if __name__ == "__main__":
    main()
