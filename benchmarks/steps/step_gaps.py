"""How long the GPU waits for the host between the steps of a steady decode, from a profiler's trace.

    python -m benchmarks.steps.step_gaps configs/qwen-shape.yaml [--batches 1 64] [--prompt 512] [--tokens 96]

Needs an NVIDIA GPU. A step ends with the kernel that picks its greedy tokens. Within a step kernels follow each other
about a microsecond apart, in a graph; where the host comes too late, a gap is as long as it is late.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.script import greedy, need_gpu, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.trace.device_events import DeviceEvent, device_events

ENDS_OF_STEPS = ("_end_kernel", "_largest_of_row")  # in the graph of a decode, and around it
STEADY_STEPS = 48  # the last ones: every request decodes in each


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=96, help="tokens of each answer")
    args = parser.parse_args()
    need_gpu()
    rng = random.Random(0)
    params = greedy(args.tokens)
    print(
        "requests | step ms, profiled | longest gap of a step, µs: median, worst | idle share | gaps over 5 µs a step"
    )
    with Engine(EngineConfig.from_yaml(args.config)) as engine:
        for count in args.batches:
            prompts = [[rng.randrange(10_000) for _ in range(args.prompt)] for _ in range(count)]
            engine.generate(prompts, params)
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                engine.generate(prompts, params)
                torch.cuda.synchronize()
            report(count, device_events(trace))


def report(count: int, events: list[DeviceEvent]) -> None:
    ends = [end for _, end, name in events if name.startswith(ENDS_OF_STEPS)][-STEADY_STEPS - 1 :]
    gaps: list[list[float]] = [[] for _ in ends[1:]]
    busy_until, step = ends[0], 0
    for start, end, _ in events:
        if end <= ends[0]:
            continue
        while step < len(gaps) and start >= ends[step + 1]:
            step += 1
        if step == len(gaps):
            break
        gaps[step].append(max(0.0, start - busy_until))
        busy_until = max(busy_until, end)
    longest = [max(of_step) for of_step in gaps]
    duration = (ends[-1] - ends[0]) / len(gaps)
    idle = sum(map(sum, gaps)) / (ends[-1] - ends[0])
    late = sum(gap > 5 for of_step in gaps for gap in of_step) / len(gaps)
    print(
        f"{count:8} | {duration / 1e3:17.3f} | {statistics.median(longest):32.1f}, {max(longest):5.1f} | "
        f"{idle:10.1%} | {late:22.2f}",
    )


if __name__ == "__main__":
    with told_in_one_line():
        main()
