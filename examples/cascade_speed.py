"""Milliseconds of a decode step of requests behind one prompt, with cascade attention and without, in one engine.

    python examples/cascade_speed.py CONFIG [--requests 8 64 256] [--shared 0 512 2048 8000] [--new 48]

The prompt is random tokens, which all requests begin with; each goes on with tokens of its own. Each pair of numbers is
timed as the estimate of cost chooses, with cascades wherever one was captured, and without any; the runtime, the process
and the GPU are the same. Prints the medians of a step from the gaps between tokens, what the estimate has chosen, and
how many tokens are the same. With nothing shared (0) the cost of looking for it remains.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from mllm_compile import Engine, EngineConfig, SamplingParams

_ROUNDS = 3


def tokens(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(100, 1000, (count,), generator=generator).tolist()


@contextmanager
def choosing(pays: Callable[[int, int], bool] | None) -> Iterator[set[bool]]:
    """Lets `pays(bytes, layers)` choose, None: the estimate; gives a set, of whether steps were cascades."""
    from mllm_compile.runtime.attention import flashinfer_backend
    from mllm_compile.runtime.model_runner import ModelRunner

    chosen: set[bool] = set()
    decode = ModelRunner.decode

    def noting(runner: ModelRunner, *batch: object) -> object:
        chosen.add(bool(batch[-1]))
        return decode(runner, *batch)  # type: ignore[arg-type]

    name = "captured_cascade_pays"
    with (
        mock.patch.object(flashinfer_backend, name, pays or getattr(flashinfer_backend, name)),
        mock.patch.object(ModelRunner, "decode", noting),
    ):
        yield chosen


def step_ms(engine: Engine, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
    """Median milliseconds of a step, and the tokens of each request."""
    times, outputs = [], []
    for count in (new // 2, new):
        asked = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        rounds = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            outputs = engine.generate(prompts, asked)
            rounds.append(time.perf_counter() - start)
        times.append(statistics.median(rounds))
    half, whole = times
    return (whole - half) / (new - new // 2) * 1e3, [list(output.token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 512, 2048, 8000])
    parser.add_argument("--new", type=int, default=48)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA GPU")
    config = EngineConfig.from_yaml(arguments.config)
    sizes = {
        "max_model_len": max(arguments.shared) + arguments.new + 64,
        "max_running_requests": max(arguments.requests),
        "cascade_attention": True,
    }
    start = time.perf_counter()
    with Engine(config.model_copy(update={"runtime": config.runtime.model_copy(update=sizes)})) as engine:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ready in {time.perf_counter() - start:.1f} s")
        generator = torch.Generator().manual_seed(0)
        for requests in arguments.requests:
            for shared in arguments.shared:
                prefix = tokens(shared, generator)
                prompts = [[*prefix, *tokens(8, generator)] for _ in range(requests)]
                if prefix:
                    engine.generate([prefix], SamplingParams(temperature=0.0, max_tokens=1))  # then it is cached
                engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
                with choosing(lambda spared, layers: False):
                    apart, theirs = step_ms(engine, prompts, arguments.new)
                with choosing(None) as chosen:
                    as_chosen, _ = step_ms(engine, prompts, arguments.new)
                with choosing(lambda spared, layers: spared > 0):
                    together, ours = step_ms(engine, prompts, arguments.new)
                pairs = [pair for one, other in zip(theirs, ours, strict=True) for pair in zip(one, other, strict=True)]
                print(
                    f"{requests:4} requests behind {shared:5} tokens: {apart:.3f} ms a step without, {together:.3f} with; "
                    f"{as_chosen:.3f} as chosen ({'with' if True in chosen else 'without'}); "
                    f"{statistics.mean(a == b for a, b in pairs):.1%} of tokens are the same",
                    flush=True,
                )


if __name__ == "__main__":
    main()
