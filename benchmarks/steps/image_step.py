"""Where the time of a first token behind images goes: new ones, the same again, and text alone.

It prints the GPU's kernels by their sum, and what the GPU waited.

    python -m benchmarks.steps.image_step configs/qwen3-vl-8b-shape.yaml [--batches 1 8] [--side 1024]
        [--text 100] [--top 25]

Needs an NVIDIA GPU. Images are random patches, as in `mllm-compile bench images`; a profiler's trace takes some time of
its own.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.script import need_gpu, parser_of, positive, told_in_one_line
from mllm_compile.bench.adapters.mllm_engine import MllmImages
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import Call
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.trace.device_events import DeviceEvent, Occupancy, device_events, times_by_name


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8], help="requests, of one image each")
    parser.add_argument("--side", type=positive, default=1024, help="pixels of a side of each image")
    parser.add_argument("--text", type=positive, default=100, help="tokens of text around it")
    parser.add_argument("--top", type=positive, default=25, help="kernels to print")
    args = parser.parse_args()
    need_gpu()
    engine = MllmImages(Setting.from_config(str(args.config), max(args.batches), 4096))
    for count in args.batches:
        length = engine.num_features(args.side) + args.text
        for kind in ("new images", "same images", "text"):
            seeds = [0, 1, 2] if kind == "new images" else [2, 2, 2]
            wall_s = 0.0
            for repeat, seed in enumerate(seeds):
                prompts = [[11 + repeat] * length] * count if kind == "text" else prompts_of(engine, count, args, seed)
                one = Call(prompts=prompts, max_tokens=[1] * count)
                if repeat < 2:
                    wall_s = wall_seconds(partial(engine.generate, one))
                    continue
                with profile(activities=[ProfilerActivity.CUDA]) as trace:
                    engine.generate(one)
                    torch.cuda.synchronize()
                report(f"{count} x {kind}", wall_s, device_events(trace), args.top)
    engine.close()


def prompts_of(engine: MllmImages, count: int, args: argparse.Namespace, seed: int) -> list[object]:
    half = args.text // 2
    images = [engine.image(args.side, 100 * seed + place) for place in range(count)]
    return [engine.prompt([7 + seed] * half, image, [9] * (args.text - half)) for image in images]


def report(title: str, wall_s: float, events: list[DeviceEvent], top: int) -> None:
    found = Occupancy.of(events)
    print(
        f"\n{title}: {wall_s * 1e3:.2f} ms unprofiled; profiled {found.whole / 1e3:.2f} ms from the first event on "
        f"the GPU to the last, {found.busy / 1e3:.2f} busy; the longest waits "
        f"{[round(wait) for wait, _ in found.longest_waits(8)]} µs"
    )
    for name, times in list(times_by_name(events).items())[:top]:
        print(f"{sum(times) / 1e3:9.3f} ms {len(times):5d} x {name[:150]}")


if __name__ == "__main__":
    with told_in_one_line():
        main()
