"""The cost of serving: `python -m tests.server.cost` measures CPU time, over a fake device, and prints three figures.

The front's, a chunk: many streams at once through HTTP on this machine, the server's process alone. The front's, a
request of token ids: its connection and an answer of one token included. The engine's thread, a step: with the events
of every step sent, and without. CPU time, as a machine that is shared says nothing in seconds; still the least of
several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from mllm_compile.engine.engine import Engine
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.engine.streams import Countdown
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.step.output import StepOutput
from mllm_compile.server.backend.step_events import StepEvents
from mllm_compile.server.wire.channel import Channel
from tests.fakes import scheduler_config
from tests.server.fake_backend import TOKENIZER, VOCAB
from tests.server.harness import fake_server

PROMPT = "Return a new list containing the items of the mapping in the order of their keys."
_TICK = os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> np.ndarray:
    """CPU seconds of a process: its own, the kernel's for it."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return np.array([int(fields[11]), int(fields[12])]) / _TICK


async def read_streams(port: int, count: int, tokens: int, path: str, prompt: dict[str, Any]) -> int:
    """Reads so many streams at once; returns how many chunks came."""
    fields = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    body = json.dumps(prompt | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        chunks = 0
        while True:
            part = await reader.read(1 << 16)
            chunks += part.count(b"data: ")
            if b"[DONE]" in part or not part:
                writer.close()
                return chunks

    return sum(await asyncio.gather(*(one() for _ in range(count))))


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})
READER = "import socket, sys\nend = socket.socket(fileno=int(sys.argv[1]))\nwhile end.recv(1 << 18):\n    pass"
IDS = ("/v1/completions", {"prompt": list(range(512))})


def front_cost(
    streams: int, tokens: int, runs: int, request: tuple[str, dict[str, Any]]
) -> tuple[list[float], list[float]]:
    """CPU µs of the front a chunk, and a request: its own, the kernel's for it; each with all that is done for both."""
    limits = {
        "max_running_requests": streams, "max_num_batched_tokens": 8192, "max_model_len": 4096,
        "num_pages": streams * (tokens // 4 + 140),
    }  # fmt: skip
    found = []
    options = {"max_queue": 4 * streams}
    with fake_server(options, {"limits": limits, "delay_s": 0.005, "quick": True}) as server:
        asyncio.run(read_streams(server.port, 1, 2, *request))
        for _ in range(runs):
            before = cpu_of(server.process.pid)
            chunks = asyncio.run(read_streams(server.port, streams, tokens, *request))
            found.append(((cpu_of(server.process.pid) - before) * 1e6, chunks))
    cpu, chunks = min(found, key=lambda run: run[0].sum() / run[1])
    return (cpu / chunks).tolist(), (cpu / streams).tolist()


class _Runner:
    """Steps that take no time; notes the engine thread's CPU time at each."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._ids = np.array(TOKENIZER.encode(PROMPT), dtype=np.int64)
        self._number = itertools.count()
        self.marks: list[float] = []

    def submit(self, batch: ScheduledBatch) -> Any:
        if batch.num_decodes == self._streams:
            self.marks.append(time.thread_time())
        count = batch.num_requests
        number = next(self._number)
        output = StepOutput(
            token_ids=self._ids[(np.arange(count) + number) % self._ids.size],
            requests=batch.requests,
            scores=None,
            score_rows=np.arange(count),
            prompt_scores=None,
            prompt_rows=np.zeros(0, dtype=np.int64),
        )

        class Handle:
            def wait(self) -> StepOutput:
                return output

        return Handle()


def engine_cost(streams: int, tokens: int, is_served: bool) -> float:
    """CPU seconds of the engine's thread a step."""
    config = scheduler_config(
        max_running_requests=streams,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        page_size=16,
        num_pages=streams * (tokens // 16 + 8),
    )
    runner = _Runner(streams)
    parts = EngineParts(scheduler=Scheduler(config), step_runner=runner, tokenizer=TOKENIZER, vocab_size=VOCAB)
    own_end, other_end = socket.socketpair()
    out = Channel(own_end)
    # A process, as the front is one: a thread here would take the interpreter's lock from the engine's.
    reader = subprocess.Popen([sys.executable, "-c", READER, str(other_end.fileno())], pass_fds=[other_end.fileno()])
    other_end.close()
    with Engine.from_parts(parts, log_interval_s=0) as engine:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        submissions = [engine.builder.build_one(f"{PROMPT} {i}", params) for i in range(streams)]
        ended = Countdown(submissions)
        if is_served:
            events = _Counted(out.send, ended)
            engine.core.tell_steps(events)
            for key, submission in enumerate(submissions):
                events.take(key, submission)
        else:
            for submission in submissions:
                submission.sink = ended
        engine.core.submit(submissions)
        ended.wait()
    out.close()
    reader.wait()
    steps = np.diff(np.array(runner.marks))[5:]
    return float(np.median(steps))


class _Counted(StepEvents):
    """Also counts the ends."""

    def __init__(self, send: Any, ended: Countdown) -> None:
        super().__init__(send)
        self._ended = ended

    def on_end(self, submission: Any) -> None:
        super().on_end(submission)
        self._ended.on_end(submission)


def lines(streams: int, tokens: int, runs: int) -> Iterator[str]:
    plain = min(engine_cost(streams, tokens, False) for _ in range(runs))
    served = min(engine_cost(streams, tokens, True) for _ in range(runs))
    yield f"engine's thread, {streams} requests: {plain * 1e3:.3f} ms a step, served {served * 1e3:.3f} ms"
    (own, kernel), _ = front_cost(streams, tokens, runs, CHAT)
    yield f"front, {streams} streams of {tokens} chunks: {own:.1f} µs of CPU a chunk, {kernel:.1f} µs of the kernel's"
    _, (own, kernel) = front_cost(streams, 1, runs, IDS)
    yield f"front, {streams} requests of 512 token ids: {own:.0f} µs of CPU a request, {kernel:.0f} µs of the kernel's"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    for line in lines(asked.streams, asked.tokens, asked.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
