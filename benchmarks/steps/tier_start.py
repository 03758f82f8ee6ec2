"""Seconds that memory behind the KV cache adds to a warm start.

    python -m benchmarks.steps.tier_start configs/qwen-8b-shape.yaml [--host-gib 64] [--rounds 2]

It is compiled first if necessary. Then engines start by turns without the memory and with it, in this process, each
until it has given a token; the driver registers the memory beside the start, and after it.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.config.sources import with_runtime


def start(config: EngineConfig, name: str) -> tuple[float, float]:
    """Seconds until an engine takes requests, and until its first token; told at once."""
    began = time.perf_counter()
    with Engine(config) as engine:
        ready = time.perf_counter() - began
        engine.generate([[5, 6, 7]], greedy(1), progress=False)
        first = time.perf_counter() - began
        print(f"{name}: {ready:.3f} s, {first:.3f} ({machine_line(str(engine.config.runtime.device))})")
    return ready, first


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--host-gib", type=float, default=64.0, help="of the host's memory (default: 64)")
    parser.add_argument("--rounds", type=positive, default=2)
    args = parser.parse_args()
    config = EngineConfig.from_yaml(args.config)
    start(config, "the first start")
    sizes = {"without": 0.0, f"with {args.host_gib:g} GiB": args.host_gib}
    ways = {
        name: partial(start, with_runtime(config, {"kv_offloading_size": size}), name) for name, size in sizes.items()
    }
    found = by_turns(ways, args.rounds, warm_ups=0)
    medians = []
    for name, times in found.items():
        ready, first = (statistics.median(column) for column in zip(*times, strict=True))
        medians.append(ready)
        print(f"{name}: ready in {ready:.3f} s, its first token after {first:.3f}")
    print(f"the memory adds {medians[1] - medians[0]:+.3f} s")


if __name__ == "__main__":
    with told_in_one_line():
        main()
