"""Input tokens a second of long prompts on two GPUs, by whole steps and by steps in halves (runtime.enable_dbo).

    python -m benchmarks.steps.overlap_speed [configs/qwen-8b-shape.yaml] [--layers 12]
        [--prompts 32x2048] [--steps 8192 16384]

With --layers the shape has as many, and the rest of the work is less: compare the two ways, not tokens a second with
the whole model's. One line for each number of tokens in a step and each way: the median of some calls, the fastest and
the slowest; then the mean distance of the first tokens' log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.bench.measure.workloads import random_prompts
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.rounds import repeated
from mllm_compile.config.folders.model_folder import open_model_folder

CALLS = 4


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", nargs="?", default="configs/qwen-8b-shape.yaml", type=Path)
    parser.add_argument("--layers", type=positive)
    parser.add_argument("--prompts", default="32x2048")
    parser.add_argument("--steps", nargs="+", type=positive, default=[8192])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    count, _, length = arguments.prompts.partition("x")
    with told_in_one_line(), tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig.from_yaml(arguments.config)
        shape = json.loads((open_model_folder(config.model).path / "config.json").read_text(encoding="utf-8"))
        if arguments.layers is not None:
            shape |= {"num_hidden_layers": arguments.layers, "max_window_layers": arguments.layers}
            shape.pop("layer_types", None)
        (Path(scratch) / "config.json").write_text(json.dumps(shape))
        prompts = random_prompts(positive(count), positive(length), shape["vocab_size"], seed=1)
        for tokens in arguments.steps:
            found = [measure(arguments, scratch, prompts, tokens, halves) for halves in (False, True)]
            apart = mean(abs(one - other) for one, other in zip(*found, strict=True))
            print(f"log-probabilities of first tokens apart by {apart:.4f}")


def measure(
    arguments: argparse.Namespace, folder: str, prompts: Sequence[Any], tokens: int, halves: bool
) -> list[float]:
    """Prints a line; gives the log-probability of each prompt's first token."""
    config = EngineConfig.from_dict(
        {
            "model": {"path": folder, "load_format": "dummy", "dtype": "bfloat16"},
            "compile": {"backend": arguments.backend},
            "cudagraph": {"mode": "none"},
            "runtime": {
                "device": arguments.device,
                "tensor_parallel_size": 2,
                "max_model_len": max(map(len, prompts)) + 1,
                "max_running_requests": 64,
                "max_num_batched_tokens": tokens,
                "enable_prefix_cache": False,
                "enable_dbo": halves,
                "dbo_prefill_token_threshold": tokens // 2,
            },
        }
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=0, detokenize=False)
    with Engine(config) as engine:
        answers = engine.generate(prompts, params)  # warms up
        seconds = repeated(lambda: wall_seconds(lambda: engine.generate(prompts, params)), CALLS, warm_ups=0)
    if error := next((answer.error for answer in answers if answer.error is not None), None):
        sys.exit(f"error: {error}")
    rates = sorted(sum(map(len, prompts)) / one for one in seconds)
    way = "in halves" if halves else "whole"
    print(
        f"{tokens:6} tokens a step, {way:9} {median(rates):9.0f} tokens/s ({rates[0]:.0f} to {rates[-1]:.0f})",
    )
    return [answer.logprobs[0][answer.token_ids[0]].logprob for answer in answers]


if __name__ == "__main__":
    main()
