"""The error of an fp8 KV cache: log-probabilities of real text and greedy answers, beside the model's own type.

    python -m benchmarks.steps.fp8_kv_error configs/tiny.yaml [--tokens 32]

The text is docstrings of Python's standard library.
"""

from __future__ import annotations

import inspect
import json
import math
import os.path
import pathlib
import shutil
import statistics

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams

DOCUMENTED = (shutil.copytree, json.dumps, os.path.join, open, print, sorted, str.split, pathlib.Path.open)
MAX_CHARACTERS = 900


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config")
    parser.add_argument("--tokens", type=positive, default=32, help="greedy tokens a prompt")
    args = parser.parse_args()
    texts = [(inspect.getdoc(item) or "")[:MAX_CHARACTERS] for item in DOCUMENTED]
    plain, fp8 = (answers(args.config, dtype, texts, args.tokens) for dtype in ("auto", "fp8_e4m3"))

    scores, fp8_scores = prompt_scores(plain), prompt_scores(fp8)
    differences = [abs(a - b) for a, b in zip(scores, fp8_scores, strict=True)]
    print(f"{len(scores)} tokens of {len(texts)} texts")
    print(f"perplexity: {perplexity(scores):.3f}, with fp8 {perplexity(fp8_scores):.3f}")
    print(f"log-probability of a token: mean difference {statistics.mean(differences):.4f}, ", end="")
    print(f"median {statistics.median(differences):.4f}, largest {max(differences):.3f}")
    alike = [number_alike(a.token_ids, b.token_ids) for a, b in zip(plain, fp8, strict=True)]
    print(f"greedy tokens before the first that differs, of {args.tokens}: {alike}")


def answers(path: str, kv_cache_dtype: str, texts: list[str], num_tokens: int) -> list[RequestOutput]:
    config = EngineConfig.from_yaml(path)
    runtime = config.runtime.model_copy(update={"kv_cache_dtype": kv_cache_dtype, "enable_prefix_cache": False})
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, prompt_logprobs=0)
    with Engine(config.model_copy(update={"runtime": runtime})) as engine:
        outputs = engine.generate(texts, params)
    print(f"  {kv_cache_dtype}: perplexity {perplexity(prompt_scores(outputs)):.3f}")
    return outputs


def prompt_scores(outputs: list[RequestOutput]) -> list[float]:
    """Log-probability of every prompt token but the first ones."""
    return [
        entry[token].logprob
        for output in outputs
        for entry, token in zip((output.prompt_logprobs or [])[1:], output.prompt_token_ids[1:], strict=True)
        if entry is not None
    ]


def perplexity(scores: list[float]) -> float:
    return math.exp(-statistics.mean(scores))


def number_alike(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


if __name__ == "__main__":
    with told_in_one_line():
        main()
