"""How many first tokens a second come of many short prompts that are sent at once.

    python -m benchmarks.steps.short_prompts_speed configs/qwen-shape.yaml [--counts 100 1000] [--batched 8192 2048]

Prompts have 20 to 200 random tokens. With several --batched an engine is made for each, with so many
runtime.max_num_batched_tokens. Nothing but the public interface is asked, so that older commits can be measured too.
"""

from __future__ import annotations

import argparse
import random
import statistics
from functools import partial
from pathlib import Path

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.rounds import repeated, with_range

SHORTEST, LONGEST = 20, 200
WARM_UPS = 2


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--counts", type=positive, nargs="+", default=[100, 1000], help="prompts at once")
    parser.add_argument("--batched", type=positive, nargs="+", help="runtime.max_num_batched_tokens of each engine")
    parser.add_argument("--single", type=positive, default=512, help="tokens of the prompt that comes alone")
    parser.add_argument("--repeats", type=positive, default=7)
    args = parser.parse_args()
    config = EngineConfig.from_yaml(args.config)
    for batched in args.batched or ("auto",):
        runtime = config.runtime.model_copy(update={"max_num_batched_tokens": batched, "enable_prefix_cache": False})
        with Engine(config.model_copy(update={"runtime": runtime})) as engine:
            measure(engine, batched, args)


def measure(engine: Engine, batched: int | str, args: argparse.Namespace) -> None:
    draws = random.Random(0)
    params = greedy(1)

    def seconds(lengths: list[int]) -> float:
        prompts = [[draws.randrange(3000) for _ in range(length)] for length in lengths]
        return wall_seconds(lambda: engine.generate(prompts, params, progress=False))

    for count in (1, *args.counts):
        lengths = [args.single] if count == 1 else [draws.randint(SHORTEST, LONGEST) for _ in range(count)]
        taken = repeated(partial(seconds, lengths), args.repeats, WARM_UPS)
        middle = statistics.median(taken)
        print(
            f"max_num_batched_tokens {batched}: {count} prompts of {sum(lengths)} tokens in "
            f"{with_range([one * 1e3 for one in taken], 2, ' ms')}: {count / middle:,.0f} first tokens a second",
        )


if __name__ == "__main__":
    with told_in_one_line():
        main()
