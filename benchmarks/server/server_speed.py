"""The cost of HTTP: tokens a second and the first token through `serve`, beside the engine's own in this process.

    python -m benchmarks.server.server_speed configs/qwen-shape.yaml [--requests 1 8 64 256]
        [--wake configs/qwen-8b-shape.yaml]

Prompts are token ids, and so are the answers of a model without a tokenizer. All requests begin at once; engine and
server answer the same ones, which a run has not seen before, after the same rest. The clients are processes of their
own (`bench serve`). A first token counts from the sending of its request on an open connection, or from the engine's
call. `--wake` is a model whose server sleeps: the time from a request until its first token, the device being free.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import Engine
from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.serving.client import Server
from mllm_compile.bench.serving.load import ServeWork, prompts_of, run_load
from mllm_compile.bench.serving.local_server import LocalServer, served
from mllm_compile.bench.timing.clock import Stopwatch

STREAMS_OF_A_CLIENT = 32
SLEEP_AFTER = "2s"
REST_S = 1.0  # as long as a server is idle while the clients of a load start: caches and clocks are cold after it
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Round:
    """Tokens a second, the first token's seconds, and of a server: seconds of a gap, and CPU seconds a token.

    Attributes:
        cpu_s: the front's own, and the kernel's for it.
    """

    tokens_per_second: float
    first_s: float
    gap_s: tuple[float, float] = (0.0, 0.0)  # p50, p99
    cpu_s: tuple[float, float] = (0.0, 0.0)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", nargs="?", default="configs/qwen-shape.yaml")
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=256, help="new tokens of each request")
    parser.add_argument("--rounds", type=positive, default=3, help="of which the median is taken")
    parser.add_argument("--wake", metavar="CONFIG", help="also the first token of a server that sleeps")
    args = parser.parse_args()
    # The round of number 0 warms up.
    works = {
        count: [
            ServeWork(
                rates=(float("inf"),),
                requests=count,
                input_tokens=args.prompt,
                output_tokens=args.tokens,
                clients=-(-count // STREAMS_OF_A_CLIENT),
                seed=number,
            )
            for number in range(args.rounds + 1)
        ]
        for count in args.requests
    }
    with served(args.config) as server:
        over_http = {count: [http_round(server, work) for work in each][1:] for count, each in works.items()}
    with Engine(args.config) as engine:
        alone = {count: [engine_round(engine, work) for work in each][1:] for count, each in works.items()}
    print(f"{args.config}: {args.prompt} tokens in, {args.tokens} out, median of {args.rounds} rounds")
    print("requests | engine tokens/s | HTTP tokens/s | share | first token, ms: engine | HTTP | more", end="")
    print(" | HTTP gap, ms: p50 | p99 | front CPU µs a token | its kernel")
    for count in args.requests:
        report(count, alone[count], over_http[count])
    if args.wake:
        with served(args.wake, "--sleep-after", SLEEP_AFTER) as server:
            wake(args.wake, server, args.rounds)


def http_round(server: LocalServer, work: ServeWork) -> Round:
    before = cpu_of(server.pid)
    rate = run_load(server.url, None, work).rates[0]
    spent = [after - before for after, before in zip(cpu_of(server.pid), before, strict=True)]
    if rate.answered < work.requests:
        raise BenchmarkError(f"{work.requests - rate.answered} of {work.requests} requests failed: {rate.errors}")
    gaps = (rate.gaps.get("p50", 0.0), rate.gaps.get("p99", 0.0))
    tokens = rate.output_tokens + work.output_tokens  # the load's first request warms up
    return Round(rate.output_tokens_per_second, rate.ttft["p50"], gaps, (spent[0] / tokens, spent[1] / tokens))


def engine_round(engine: Engine, work: ServeWork) -> Round:
    params = greedy(work.output_tokens)
    time.sleep(REST_S)
    prompts = prompts_of(work, 0)
    called = time.time()
    watch = Stopwatch()
    outputs = engine.generate(prompts, params, progress=False)
    seconds = watch.seconds
    firsts = [
        # Arrival is when the engine has made a request of a prompt: over HTTP, that is waited for as well.
        output.metrics.arrival_time - called + output.metrics.time_to_first_token
        for output in outputs
        if output.metrics is not None and output.metrics.time_to_first_token is not None
    ]
    return Round(work.requests * work.output_tokens / seconds, statistics.median(firsts))


def cpu_of(pid: int) -> tuple[float, float]:
    """CPU seconds of a process: its own, the kernel's for it."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) / _TICK, int(fields[12]) / _TICK


def report(count: int, alone: list[Round], over_http: list[Round]) -> None:
    own, through = (statistics.median(one.tokens_per_second for one in rounds) for rounds in (alone, over_http))
    first, later = (statistics.median(one.first_s for one in rounds) * 1e3 for rounds in (alone, over_http))
    middle, late = (statistics.median(one.gap_s[at] for one in over_http) * 1e3 for at in (0, 1))
    front, kernel = (statistics.median(one.cpu_s[at] for one in over_http) * 1e6 for at in (0, 1))
    print(f"{count:8} | {own:15.1f} | {through:13.1f} | {through / own:5.1%} | {first:23.2f} | {later:4.2f}", end="")
    print(f" | {later - first:4.2f} | {middle:17.2f} | {late:4.2f} | {front:20.1f} | {kernel:10.1f}")


def wake(config: str, server: LocalServer, rounds: int) -> None:
    """Prints the first token's time of a request that meets a sleeping engine."""
    work = ServeWork(rates=(1.0,), requests=rounds, input_tokens=128)
    firsts, used = asyncio.run(wakings(Server(server.url, None), work))
    print(f"{config}: asleep, first token after {', '.join(f'{first:.2f}' for first in firsts)} s; {used}")


async def wakings(server: Server, work: ServeWork) -> tuple[list[float], str]:
    firsts, used = [], ""
    for prompt in prompts_of(work, 0):
        while (await server.get("/health"))["state"] != "asleep":
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # until its process has ended
        used = memory_used()
        fields = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0, "stream": True}
        seen = await server.stream("/v1/completions", fields | {"stream_options": {"include_usage": True}})
        if seen.error is not None:
            raise BenchmarkError(f"the sleeping server does not answer: {seen.error}")
        firsts.append(seen.chunks[0] - seen.started)
    return firsts, used


def memory_used() -> str:
    """The device's memory in use, as its driver says."""
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return f"GPU memory in use meanwhile: {' '.join(answer.split())}"


if __name__ == "__main__":
    with told_in_one_line():
        main()
