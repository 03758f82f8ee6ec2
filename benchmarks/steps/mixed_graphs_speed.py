"""The gain of one graph for a whole step with prompts, against graphs of its pieces with attention between them.

    python -m benchmarks.steps.mixed_graphs_speed configs/qwen-shape.yaml [--tokens 64 128] [--running 64]

Needs an NVIDIA Hopper GPU. Two engines, one after another: one that captures such steps (of
--tokens, or else of the config's `cudagraph.mixed_tokens`), one that does not. Of each the milliseconds until
a prompt's first token, alone and behind a cached prefix, and output tokens a second while a new prompt joins whenever a
request ends.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.script import greedy, need_hopper, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.clock import Stopwatch, wall_seconds
from mllm_compile.bench.timing.rounds import repeated
from mllm_compile.process.console import print_table

PROMPTS = ((1, 32), (1, 128), (1, 256), (1, 512), (4, 64), (4, 128))  # prompts at once, tokens of each
PREFIXES = (1000, 3500)
PREFIXED_TOKENS = 60
ARRIVALS = ((100, 64), (300, 128))  # tokens of a prompt, of an answer on average
WARM_UPS, REPEATS, ARRIVAL_REPEATS = 4, 25, 3


def first_token_ms(engine: Engine, draws: random.Random, count: int, length: int, prefix: list[int]) -> float:
    params = greedy(1)

    def take() -> float:
        prompts = [prefix + draw(draws, length) for _ in range(count)]
        return wall_seconds(lambda: engine.generate(prompts, params)) * 1e3

    return statistics.median(repeated(take, REPEATS, WARM_UPS))


def arrival_tokens_s(engine: Engine, draws: random.Random, num_requests: int, length: int, answer: int) -> float:
    """Answers of half to one and a half times `answer` tokens, so that requests end one by one."""
    params = [greedy(draws.randrange(answer // 2, answer * 3 // 2)) for _ in range(num_requests)]

    def take() -> float:
        prompts = [draw(draws, length) for _ in params]
        watch = Stopwatch()
        outputs = engine.generate(prompts, params)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / watch.seconds

    return statistics.median(repeated(take, ARRIVAL_REPEATS, warm_ups=0))


def draw(draws: random.Random, length: int) -> list[int]:
    return [draws.randrange(3, 1000) for _ in range(length)]


def measure(config: EngineConfig, running: int, requests: int) -> dict[str, str]:
    draws = random.Random(0)
    found = {}
    with Engine(config) as engine:
        for count, length in PROMPTS:
            found[f"{count} x {length}, ms"] = f"{first_token_ms(engine, draws, count, length, []):.2f}"
        for length in PREFIXES:
            prefix = draw(draws, length)
            engine.generate(prefix, greedy(1))
            name = f"{PREFIXED_TOKENS} after {length}, ms"
            found[name] = f"{first_token_ms(engine, draws, 1, PREFIXED_TOKENS, prefix):.2f}"
        for length, answer in ARRIVALS:
            name = f"{length} in, {answer} out, {running} at once, tokens/s"
            found[name] = f"{arrival_tokens_s(engine, draws, requests, length, answer):.0f}"
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=positive, nargs="+", help="sizes to capture, in place of the config's")
    parser.add_argument("--running", type=positive, default=64, help="requests at once while others wait")
    parser.add_argument("--requests", type=positive, default=384, help="requests in all")
    args = parser.parse_args(argv)
    need_hopper()
    asked = EngineConfig.from_yaml(args.config).model_dump(mode="json")
    asked["runtime"]["max_running_requests"] = args.running
    sizes = asked["cudagraph"]["mixed_tokens"] if args.tokens is None else args.tokens
    columns = []
    for mixed_tokens in (sizes, list[int]()):
        config = EngineConfig.from_dict(asked | {"cudagraph": asked["cudagraph"] | {"mixed_tokens": mixed_tokens}})
        columns.append(measure(config, args.running, args.requests))
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    print_table(sys.stdout, args.config.stem, ("", "in one graph", "piece by piece"), rows)


if __name__ == "__main__":
    with told_in_one_line():
        main()
