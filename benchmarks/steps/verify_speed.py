"""Milliseconds of a verify step beside a plain decode step, and of a token at a forced acceptance length.

    python -m benchmarks.steps.verify_speed CONFIG [--requests 1,8,32,64] [--drafted 1,3,7] [--prompt 512]

Needs an NVIDIA GPU. An engine without speculation comes first and last, and one for each number of drafted tokens
between them. These draft by n-grams with synthetic_acceptance_length, which is --share of the drafted tokens and one
(0.5: 2.5 tokens a step where 3 are drafted). Prompts are random tokens. Answers of --new tokens and of half as many
differ by time and by steps, and so no prompt is in these. Prints medians of rounds, a step's ratio to the plain one,
and the tokens that a step gave in truth.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.script import greedy, need_gpu, parser_of, positive, positives, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.record import machine_line

_ROUNDS = 5


def config_of(config: EngineConfig, num_drafted: int, length: float, most: int, most_tokens: int) -> EngineConfig:
    runtime = config.runtime.model_copy(update={"max_running_requests": most, "max_model_len": most_tokens})
    asked = {"method": "none"}
    if num_drafted:
        asked = {
            "method": "ngram",
            "num_speculative_tokens": num_drafted,
            "synthetic_acceptance_length": length,
        }
    speculative = type(config.speculative).model_validate(asked)
    return config.model_copy(update={"runtime": runtime, "speculative": speculative})


@dataclass(frozen=True)
class Pace:
    """The pace of one engine and batch, without its prompts.

    Attributes:
        token_ms: milliseconds between two tokens of a request.
        step_ms: milliseconds of a step.
    """

    token_ms: float
    step_ms: float


def pace_of(engine: Engine, prompts: list[list[int]], new: int) -> Pace:
    """The median of rounds. Steps are counted, as what is accepted is drawn."""
    paces = []
    for _ in range(_ROUNDS):
        half, whole = (_timed(engine, prompts, count) for count in (new // 2, new))
        seconds, num_steps = (both[1] - both[0] for both in zip(half, whole, strict=True))
        num_tokens = new - new // 2
        paces.append(Pace(seconds / num_tokens * 1e3, seconds / num_steps * 1e3))
    return Pace(*(statistics.median(getattr(pace, name) for pace in paces) for name in ("token_ms", "step_ms")))


def _timed(engine: Engine, prompts: list[list[int]], new: int) -> tuple[float, int]:
    """Seconds and steps of an answer of `new` tokens to each prompt."""
    before = engine.stats().steps
    seconds = wall_seconds(lambda: engine.generate(prompts, greedy(new)))
    return seconds, engine.stats().steps - before


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positives, default=[1, 8, 32, 64])
    parser.add_argument("--drafted", type=positives, default=[1, 3, 7])
    parser.add_argument("--prompt", type=positive, default=512)
    parser.add_argument("--new", type=positive, default=256)
    parser.add_argument("--share", type=float, default=0.5)
    arguments = parser.parse_args()
    need_gpu()
    config = EngineConfig.from_yaml(arguments.config)
    print(machine_line())
    generator = torch.Generator().manual_seed(0)
    plain: dict[int, float] = {}
    most_tokens = arguments.prompt + arguments.new + 64
    for num_drafted in [0, *arguments.drafted, 0]:
        length = 1 + arguments.share * num_drafted
        with Engine(config_of(config, num_drafted, length, max(arguments.requests), most_tokens)) as engine:
            for count in arguments.requests:
                if count * (1 + num_drafted) > 256:
                    continue  # these are not captured
                prompts = torch.randint(100, 1000, (count, arguments.prompt), generator=generator).tolist()
                engine.generate(prompts, greedy(2))  # now their prefixes are cached
                pace = pace_of(engine, prompts, arguments.new)
                if not num_drafted:
                    plain[count] = pace.step_ms
                    print(f"{count:4} requests: {pace.step_ms:.3f} ms a plain step", flush=True)
                    continue
                print(
                    f"{count:4} requests, {num_drafted} drafted: {pace.step_ms:.3f} ms a step, "
                    f"{pace.step_ms / plain[count]:.3f} of a plain one; {pace.token_ms:.3f} ms a token at "
                    f"{pace.step_ms / pace.token_ms:.2f} tokens a step",
                    flush=True,
                )


if __name__ == "__main__":
    with told_in_one_line():
        main()
