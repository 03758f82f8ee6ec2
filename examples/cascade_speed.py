"""Milliseconds of a decode step of many requests behind one long prompt, with and without cascade attention.

    python examples/cascade_speed.py CONFIG [--requests 64] [--shared 8000] [--new 64] [--only on|off]

The prompt is random tokens, which all requests begin with; each goes on with tokens of its own. Two runtimes are
compiled, with `runtime.cascade_attention` on and off. Prints the median time of a step from the gaps between tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from mllm_compile import Engine, EngineConfig, SamplingParams


def step_ms(config: EngineConfig, requests: int, shared: int, new: int) -> tuple[float, list[list[int]]]:
    """Median milliseconds of a step, and the tokens of each request."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(100, 1000, (count,), generator=generator).tolist()

    prefix = tokens(shared)
    prompts = [[*prefix, *tokens(8)] for _ in range(requests)]
    with Engine(config) as engine:
        engine.generate([prefix], SamplingParams(temperature=0.0, max_tokens=1))  # then it is cached
        long = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        engine.generate(prompts, long)
        times, outputs = [], []
        for count in (new // 2, new):
            asked = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            rounds = []
            for _ in range(3):
                start = time.perf_counter()
                outputs = engine.generate(prompts, asked)
                rounds.append(time.perf_counter() - start)
            times.append(statistics.median(rounds))
    half, whole = times
    return (whole - half) / (new - new // 2) * 1e3, [output.token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=8000)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--only", choices=("on", "off"), help="compile and time one of both")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA GPU")
    config = EngineConfig.from_yaml(arguments.config)
    sizes = {
        "max_model_len": arguments.shared + arguments.new + 64,
        "max_running_requests": arguments.requests,
    }
    found = {}
    wanted = {"on": (True,), "off": (False,), None: (False, True)}[arguments.only]
    for is_on in wanted:
        runtime = config.runtime.model_copy(update={**sizes, "cascade_attention": is_on})
        found[is_on] = step_ms(
            config.model_copy(update={"runtime": runtime}), arguments.requests, arguments.shared, arguments.new
        )
        print(f"cascade_attention: {is_on}: {found[is_on][0]:.2f} ms a step", flush=True)
    if arguments.only:
        return
    (apart, theirs), (together, ours) = found[False], found[True]
    pairs = [pair for one, other in zip(theirs, ours, strict=True) for pair in zip(one, other, strict=True)]
    same = statistics.mean(a == b for a, b in pairs)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.requests} requests behind "
        f"{arguments.shared} tokens: {apart / together:.2f} times as fast; {same:.1%} of tokens are the same"
    )


if __name__ == "__main__":
    main()
