"""What one run of long requests takes, once and with no warm-up: for models whose prompts take half a minute.

    python examples/measure/one_run.py CONFIG.yaml [--requests 64] [--prompt 4096] [--tokens 33]

All requests come at once. Their first tokens are timed from then on, and the steps of the request that was first
answered last, in which all of them decode. `mllm-compile bench` measures both several times, in parts.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from mistakes import positive, told_in_one_line

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.bench.measure.harness import probe_machine

LEAST_VOCABULARY = 100  # ids of prompts are below: every model has them


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--prompt", type=positive, default=4096, help="tokens of each prompt (default: 4096)")
    parser.add_argument("--tokens", type=positive, default=33, help="tokens of each answer (default: 33)")
    args = parser.parse_args()
    if args.tokens < 2:
        parser.error("--tokens 1: expected at least 2, as the first is the prompt's")
    probe = probe_machine(str(args.config), args.requests, args.prompt + args.tokens)
    random.seed(0)
    prompts = [[random.randrange(LEAST_VOCABULARY) for _ in range(args.prompt)] for _ in range(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    with Engine(EngineConfig.from_yaml(args.config)) as engine:
        metrics = [output.metrics for output in engine.generate(prompts, params) if output.metrics is not None]
        preemptions = engine.stats().preemptions
    prefill, decode = max((found.time_to_first_token or 0.0, found.decode_time or 0.0) for found in metrics)
    step = decode / (args.tokens - 1)
    limit = probe.figures.decode_seconds(probe.ceilings, [args.prompt + args.tokens / 2] * args.requests)
    least = probe.figures.prefill_seconds(probe.ceilings, [args.prompt] * args.requests)
    print(f"{args.requests} requests of {args.prompt} + {args.tokens} tokens, {preemptions} preemptions")
    print(f"tpot {step * 1e3:.2f} ms, limit {limit * 1e3:.2f}, {limit / step:.0%} of it")
    print(f"prompts {prefill:.2f} s, {args.requests * args.prompt / prefill:,.0f} tokens/s, {least / prefill:.0%}")
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
