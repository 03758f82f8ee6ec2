"""The time of one run of long requests, with no warm-up: for models whose prompts take half a minute.

    python -m benchmarks.steps.one_run CONFIG.yaml [--requests 64] [--prompt 4096] [--tokens 257]

All requests come at once. Prompts are timed until the last request's first token, and decode steps from then until the
first request ends: in between all of them decode. `mllm-compile bench` measures both several times, in parts.
"""

from __future__ import annotations

import random
import sys
from itertools import accumulate
from pathlib import Path

from benchmarks.script import greedy, mistake, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.measure.harness import probe_machine
from mllm_compile.bench.timing.clock import Stopwatch

LEAST_VOCABULARY = 100  # ids of prompts are below: every model has them
LEAST_STEPS = 8  # that a mean is taken of


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--prompt", type=positive, default=4096, help="tokens of each prompt (default: 4096)")
    parser.add_argument("--tokens", type=positive, default=257, help="tokens of each answer (default: 257)")
    args = parser.parse_args()
    probe = probe_machine(str(args.config), args.requests, args.prompt + args.tokens)
    random.seed(0)
    prompts = [[random.randrange(LEAST_VOCABULARY) for _ in range(args.prompt)] for _ in range(args.requests)]
    params = greedy(args.tokens)
    with Engine(EngineConfig.from_yaml(args.config)) as engine:
        watch = Stopwatch()
        streams = [engine.stream(prompt, params) for prompt in prompts]
        new = [(len(output.token_ids), watch.seconds) for output in streams[-1]]
        others = [[*stream][-1].metrics for stream in streams[:-1]]
        preemptions = engine.stats().preemptions
    answered = zip(accumulate(count for count, _ in new), (at for _, at in new), strict=True)
    first_end = min((found.total_time or 0.0 for found in others if found is not None), default=new[-1][1])
    together = [(count, at) for count, at in answered if at <= first_end]
    if len(together) <= LEAST_STEPS:
        mistake(f"--tokens {args.tokens}: requests end before the last one has begun; give answers of more tokens")
    (first, prefill), (last, end) = together[0], together[-1]
    step, done = (end - prefill) / (last - first), args.prompt + (first + last) / 2
    limit = probe.figures.decode_seconds(probe.ceilings, [done] * args.requests)
    least = probe.figures.prefill_seconds(probe.ceilings, [args.prompt] * args.requests)
    print(f"{args.requests} requests of {args.prompt} + {args.tokens} tokens, {preemptions} preemptions")
    print(f"tpot {step * 1e3:.2f} ms over {last - first} steps, limit {limit * 1e3:.2f}, {limit / step:.0%} of it")
    print(f"prompts {prefill:.2f} s, {args.requests * args.prompt / prefill:,.0f} tokens/s, {least / prefill:.0%}")
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
