"""Milliseconds of a decode step of requests behind one prompt, with cascade attention and without, in one engine.

    python -m benchmarks.steps.cascade_speed CONFIG [--requests 8 64] [--shared 0 512 2048 8000] [--new 128]

Needs an NVIDIA GPU. The prompt is random tokens, which all requests begin with; each goes on with tokens of its own.
Each pair of numbers is timed without cascades, as the estimate of cost chooses, and with cascades wherever one was
captured, in turns; the runtime, the process and the GPU are the same. Prints the medians of a step from the gaps
between tokens, what the estimate has chosen, and how many tokens are the same. With nothing shared (0) the cost of
looking for it remains.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.script import need_gpu, parser_of, told_in_one_line
from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch

_ROUNDS = 5


def tokens(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(100, 1000, (count,), generator=generator).tolist()


@contextmanager
def choosing(pays: Callable[[int, int], bool] | None) -> Iterator[set[bool]]:
    """Lets `pays(bytes, layers)` choose, None: the estimate; gives a set, of whether steps were cascades."""
    from mllm_compile.runtime.attention import flashinfer_backend
    from mllm_compile.runtime.step.common_prefix import CommonPrefix

    chosen: set[bool] = set()
    num_tokens = CommonPrefix.num_tokens

    def noting(prefix: CommonPrefix, batch: ScheduledBatch, is_captured: bool) -> int:
        shared = num_tokens(prefix, batch, is_captured)
        chosen.add(shared > 0)
        return shared

    name = "captured_cascade_pays"
    with (
        mock.patch.object(flashinfer_backend, name, pays or getattr(flashinfer_backend, name)),
        mock.patch.object(CommonPrefix, "num_tokens", noting),
    ):
        yield chosen


class Way:
    """One way to choose, and what it took.

    Attributes:
        pays: as `choosing` takes it.
        seconds: of generating the fewer and the more tokens.
        tokens: of each request.
        is_cascade: whether some step was one.
    """

    def __init__(self, pays: Callable[[int, int], bool] | None) -> None:
        self.pays = pays
        self.seconds: tuple[list[float], list[float]] = [], []
        self.tokens: list[list[int]] = []
        self.is_cascade = False

    def run(self, engine: Engine, prompts: list[list[int]], new: int) -> None:
        with choosing(self.pays) as chosen:
            for seconds, count in zip(self.seconds, (new // 2, new), strict=True):
                asked = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                watch = Stopwatch()
                outputs = engine.generate(prompts, asked)
                seconds.append(watch.seconds)
                self.tokens = [list(output.token_ids) for output in outputs]
        self.is_cascade |= True in chosen

    def step_ms(self, new: int) -> float:
        half, whole = (statistics.median(seconds) for seconds in self.seconds)
        return (whole - half) / (new - new // 2) * 1e3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 512, 2048, 8000])
    parser.add_argument("--new", type=int, default=128)
    arguments = parser.parse_args()
    need_gpu()
    config = EngineConfig.from_yaml(arguments.config)
    sizes = {
        "max_model_len": max(arguments.shared) + arguments.new + 64,
        "max_running_requests": max(arguments.requests),
        "cascade_attention": True,
    }
    watch = Stopwatch()
    with Engine(config.model_copy(update={"runtime": config.runtime.model_copy(update=sizes)})) as engine:
        print(f"{machine_line()}; ready in {watch.seconds:.1f} s")
        generator = torch.Generator().manual_seed(0)
        for requests in arguments.requests:
            for shared in arguments.shared:
                prefix = tokens(shared, generator)
                prompts = [[*prefix, *tokens(8, generator)] for _ in range(requests)]
                if prefix:
                    engine.generate([prefix], SamplingParams(temperature=0.0, max_tokens=1))  # then it is cached
                engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
                ways = Way(lambda spared, layers: False), Way(None), Way(lambda spared, layers: spared > 0)
                for _ in range(_ROUNDS):
                    for way in ways:
                        way.run(engine, prompts, arguments.new)
                apart, as_chosen, together = ways
                pairs = zip(apart.tokens, together.tokens, strict=True)
                same = statistics.mean(a == b for pair in pairs for a, b in zip(*pair, strict=True))
                print(
                    f"{requests:4} requests behind {shared:5} tokens: {apart.step_ms(arguments.new):.3f} ms a step "
                    f"without, {together.step_ms(arguments.new):.3f} with; {as_chosen.step_ms(arguments.new):.3f} as "
                    f"chosen ({'with' if as_chosen.is_cascade else 'without'}); {same:.1%} of tokens are the same",
                )


if __name__ == "__main__":
    with told_in_one_line():
        main()
