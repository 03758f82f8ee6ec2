"""The watts and clocks of a GPU in decode steps and prefills: does its power limit hold them up?

    python -m benchmarks.steps.step_power configs/qwen-8b-shape.yaml [--batches 64 256] [--prompt 512] [--tokens 129]

Needs an NVIDIA GPU and the `cuda` extra. The driver counts energy; over one second a reading
repeats to a tenth, over three to half a per cent, so work is repeated for `--seconds`.
Prompts with `--tokens` new tokens, less the same prompts with one, are decode steps.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.script import greedy, mistake, need_gpu, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.gpu_meter import GpuMeter, Nvml


@dataclass(frozen=True)
class Drawn:
    """One stretch of work: seconds, joules, and the median clock of the multiprocessors in MHz."""

    seconds: float
    joules: float
    clock: float


class Meter:
    """Reads the GPU that torch uses."""

    def __init__(self) -> None:
        gpu = Nvml.of("cuda")
        if gpu is None:
            sys.exit("needs nvidia-ml-py, which reads the driver's counters: pip install nvidia-ml-py")
        self.limit_watts = gpu.limit_watts
        self._meter = GpuMeter(gpu)

    def measure(self, work: Callable[[], object], repeats: int, skipped_s: float = 0.0) -> Drawn:
        """`work` so many times; clocks of the first `skipped_s` of each are left out."""
        begins = []
        with self._meter.watching() as span:
            for _ in range(repeats):
                begins.append(self._meter.now)
                work()
        ends = [*begins[1:], self._meter.now]
        clocks = [
            one.clock_mhz
            for begin, end in zip(begins, ends, strict=True)
            for one in span.inside
            if begin + skipped_s <= one.at < end
        ]
        return Drawn(span.seconds, span.joules, statistics.median(clocks or [math.nan]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batches", type=positive, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=129, help="tokens of each answer")
    parser.add_argument("--seconds", type=positive, default=3, help="of prefills and of decodes, at least")
    args = parser.parse_args()
    need_gpu()
    if args.tokens == 1:
        mistake("--tokens 1: the first token is the prefill's; expected two at least")
    sections = EngineConfig.from_yaml(args.config).model_dump()
    sections["runtime"]["enable_prefix_cache"] = False
    meter = Meter()
    with Engine(EngineConfig.from_dict(sections)) as engine:
        print(f"{torch.cuda.get_device_name()}, limit {meter.limit_watts:.0f} W")
        print("requests | work               |        ms |     W | SM MHz |  mJ a token")
        for count in args.batches:
            report(engine, meter, count, args)


def report(engine: Engine, meter: Meter, count: int, args: argparse.Namespace) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(10_000) for _ in range(args.prompt)] for _ in range(count)]

    def generate(tokens: int) -> None:
        params = greedy(tokens)
        engine.generate(prompts, params, progress=False)

    for tokens in (1, args.tokens):
        generate(tokens)  # warm
    prefill_s, whole_s = (meter.measure(lambda n=n: generate(n), 1).seconds for n in (1, args.tokens))
    short_repeats = math.ceil(args.seconds / prefill_s)
    repeats = math.ceil(args.seconds / max(whole_s - prefill_s, 1e-3))
    prefill = meter.measure(lambda: generate(1), short_repeats)
    whole = meter.measure(lambda: generate(args.tokens), repeats, skipped_s=prefill_s)
    prefills = repeats / short_repeats  # what of `whole` is prefill
    decode = Drawn(whole.seconds - prefill.seconds * prefills, whole.joules - prefill.joules * prefills, whole.clock)
    steps = args.tokens - 1
    show(count, f"prefill of {args.prompt}", prefill, short_repeats, count * args.prompt)
    show(count, "decode step", decode, repeats * steps, count)


def show(count: int, work: str, drawn: Drawn, times: int, tokens: int) -> None:
    """A row of the table: `times` pieces of work of so many tokens each."""
    watts, each = drawn.joules / drawn.seconds, drawn.joules / times
    print(
        f"{count:8} | {work:18} | {drawn.seconds / times * 1e3:9.3f} | {watts:5.0f} | {drawn.clock:6.0f} | "
        f"{each / tokens * 1e3:11.3f}",
    )


if __name__ == "__main__":
    with told_in_one_line():
        main()
