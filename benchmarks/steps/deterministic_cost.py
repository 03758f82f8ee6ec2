"""The cost of `runtime.deterministic`: tokens a second of decoding with it and without, by number of requests.

    python -m benchmarks.steps.deterministic_cost configs/qwen-8b-shape.yaml [--requests 1 64 100]
        [--prompt 512] [--tokens 256] [--kernels]

Prompts are token ids, so a model without a tokenizer will do. Decoding is timed while every request decodes, from the
moment when the last has its first token; the prompts' time is shown beside it. With --kernels some further steps are
profiled: a layer's kernels by start and end, as verify_parts.py has them.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from benchmarks.steps.verify_parts import STEPS, report
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.bench.trace.device_events import device_events

WARM_UP_TOKENS, PROFILED_TOKENS = 4, 2 * STEPS


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config")
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 64, 100])
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=256, help="decode steps that are timed")
    parser.add_argument("--kernels", action="store_true", help="profile steps too; needs an NVIDIA GPU")
    args = parser.parse_args()
    if args.kernels and not torch.cuda.is_available():
        parser.error("--kernels needs an NVIDIA GPU")
    figures = {mode: measure(args, mode) for mode in (False, True)}
    print("requests | decode tokens/s | deterministic | of it | prompt tokens/s | deterministic")
    for i, count in enumerate(args.requests):
        (decode, prefill), (fixed_decode, fixed_prefill) = figures[False][i], figures[True][i]
        print(
            f"{count:8} | {decode:15.0f} | {fixed_decode:13.0f} | {fixed_decode / decode:5.0%} | {prefill:15.0f} | "
            f"{fixed_prefill:13.0f}"
        )


def measure(args: argparse.Namespace, deterministic: bool) -> list[tuple[float, float]]:
    """(decode, prompt) tokens a second for each number of requests."""
    config = EngineConfig.from_yaml(args.config)
    changes: dict[str, Any] = {"deterministic": deterministic, "enable_prefix_cache": False}
    if deterministic:  # by default half of a step's rows are kept for prompts
        changes["max_running_requests"] = max(args.requests)
    with Engine(config.model_copy(update={"runtime": config.runtime.model_copy(update=changes)})) as engine:
        gc.freeze()  # torch was there before: the collector would look at all imports amid what is timed
        run(engine, 1, args.prompt, WARM_UP_TOKENS, kernels=False)
        found = []
        for count in args.requests:
            decode, prompts = run(engine, count, args.prompt, args.tokens, args.kernels)
            mode = "deterministic" if deterministic else "plain"
            print(f"  {mode}, {count} requests: {decode:.0f} decode tokens/s, {prompts:.0f} prompt tokens/s")
            found.append((decode, prompts))
        return found


def run(engine: Engine, num_requests: int, prompt_length: int, num_tokens: int, kernels: bool) -> tuple[float, float]:
    rng = random.Random(0)
    # So long that none has ended when the last prompt is done: in deterministic mode a step computes few of its tokens.
    longest = engine.config.runtime.max_model_len - prompt_length
    if longest <= num_tokens + kernels * PROFILED_TOKENS:
        sys.exit(
            f"{num_tokens} tokens after {prompt_length} are more than runtime.max_model_len has room for; raise it"
        )
    params = greedy(longest)
    watch = Stopwatch()
    streams = [engine.stream([rng.randrange(1000) for _ in range(prompt_length)], params) for _ in range(num_requests)]
    for stream in streams:
        next(stream)
    prompt_seconds, before = watch.seconds, engine.stats()
    watch = Stopwatch()
    for _ in range(num_tokens):
        next(streams[-1])
    seconds, after = watch.seconds, engine.stats()
    if after.running < num_requests:
        sys.exit(f"only {after.running} of {num_requests} requests still decode; raise runtime.max_model_len")
    if kernels:
        print_layer(streams[-1])
    for stream in streams:
        stream.close()
    return (
        (after.generated_tokens - before.generated_tokens) / seconds,
        num_requests * prompt_length / prompt_seconds,
    )


def print_layer(stream: Iterator[Any]) -> None:
    """Profiles further steps of running requests, and prints a layer's kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED_TOKENS):
            next(stream)
        torch.cuda.synchronize()
    print(*report(device_events(trace)), sep="\n", flush=True)


if __name__ == "__main__":
    with told_in_one_line():
        main()
