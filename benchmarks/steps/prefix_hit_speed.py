"""Milliseconds to the first token of a prompt that the prefix cache knows, beside one that it does not.

    python -m benchmarks.steps.prefix_hit_speed configs/qwen3_5-text-shape.yaml [--tokens 2000] [--prompts 8]

Each prompt is of random ids; it is asked for one token, and then for one again and again. Of a model whose layers carry
a state, each time but the first goes on from a snapshot of it. The first hit finds a GPU whose clock the miss has
slowed, and a host that has waited for it; the later ones do not.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.rounds import with_range

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
WARM_UPS = 2
LATER_HITS = 6
LEAST_VOCABULARY = 100  # ids of prompts are below: every model has them


def milliseconds(engine: Engine, prompt: list[int]) -> float:
    return wall_seconds(lambda: engine.generate([prompt], ONE_TOKEN)) * 1000


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=positive, default=2000, help="of each prompt (default: 2000)")
    parser.add_argument("--prompts", type=positive, default=8, help="measured ones (default: 8)")
    args = parser.parse_args()
    random.seed(0)
    misses, hits, later = [], [], []
    with Engine(EngineConfig.from_yaml(args.config)) as engine:
        for index in range(WARM_UPS + args.prompts):
            prompt = [random.randrange(LEAST_VOCABULARY) for _ in range(args.tokens)]
            times = milliseconds(engine, prompt), milliseconds(engine, prompt)
            in_a_row = [milliseconds(engine, prompt) for _ in range(LATER_HITS)]
            if index >= WARM_UPS:
                misses.append(times[0])
                hits.append(times[1])
                later.append(statistics.median(in_a_row))
        stats = engine.stats()
    share = stats.prefix_hit_tokens / max(1, args.tokens * (WARM_UPS + args.prompts) * (1 + LATER_HITS))
    missed = with_range(misses, 2, " ms")
    print(f"first token of {args.tokens}: a miss takes {missed}; a hit found {share:.0%} of its prompt")
    for what, found in (("behind a miss", hits), ("behind other hits", later)):
        times_faster = statistics.median(misses) / statistics.median(found)
        print(f"a hit {what} takes {with_range(found, 2, ' ms')}: {times_faster:.1f} times faster")
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
