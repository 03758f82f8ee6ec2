"""The error of each switch: log-probabilities against float32, with all switches, without one, without any.

    python -m benchmarks.steps.switch_error configs/tiny.yaml [--dtype bfloat16] [--switches fuse_few_tokens
    split_decode]

A switch is a pass that can be left out, or a decode kernel (`split_decode`, `hopper_decode`). Which kernels compute a
step depends on how many tokens it has: there is a column for whole prompts and one for each number of requests that
decode at once.
Texts are docstrings of Python's standard library, or random tokens for a model without a tokenizer. Each answer is
the engine's own, greedy; the reference scores the same tokens on the CPU. Most switches are kernels for a GPU, and some
take only weights whose sizes are multiples of 256: where nothing is taken nothing changes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
import random
import shutil
import statistics
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from benchmarks.steps.fp8_kv_error import prompt_scores
from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from mllm_compile.passes.pipeline import optional_pass_names
from mllm_compile.process.console import print_table

MODULES = (pathlib.Path, shutil, textwrap, json, inspect, str, list, dict, argparse)
MIN_CHARACTERS, MAX_CHARACTERS = 60, 600
DECODE_KERNELS = ("hopper_decode", "split_decode")


def main(arguments: Sequence[str] | None = None) -> None:
    known = [*optional_pass_names(), *DECODE_KERNELS]
    parser = parser_of(__doc__)
    parser.add_argument("config")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--switches", nargs="+", default=known, choices=known)
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 8, 64], help="that decode at once")
    parser.add_argument("--tokens", type=positive, default=48, help="of each answer")
    args = parser.parse_args(arguments)
    if EngineConfig.from_yaml(args.config).model.load_format == "dummy":
        sys.exit("random weights of two types are two models; give a model that has weights")
    variants = (
        {"all": ()} | {f"without {switch}": (switch,) for switch in args.switches} | {"none": tuple(args.switches)}
    )

    rows = []
    with Engine(changed(args.config, "float32", is_reference=True)) as reference:
        count = max(args.requests)
        texts = random_prompts(count) if reference.tokenizer is None else documents(count)
        for name, left_out in variants.items():
            with Engine(changed(args.config, args.dtype, left_out)) as engine:
                cells = [difference(engine, reference, texts, 0)]
                cells += [difference(engine, reference, texts[:count], args.tokens) for count in args.requests]
            rows.append((name, *cells))
    columns = ("switches", "prompts", *(f"{count} decode" for count in args.requests))
    print_table(sys.stdout, f"|log-probability - float32's|: mean, largest ({args.dtype})", columns, rows)


Prompts = list[str] | list[list[int]]


def random_prompts(count: int) -> Prompts:
    """Token ids, with the texts' lengths."""
    rng = random.Random(0)
    return [[rng.randrange(1000) for _ in range(rng.randint(20, 200))] for _ in range(count)]


def documents(count: int) -> Prompts:
    """Docstrings, each once."""
    items = [getattr(module, name) for module in MODULES for name in dir(module) if not name.startswith("_")]
    texts = dict.fromkeys((inspect.getdoc(item) or "")[:MAX_CHARACTERS] for item in items if callable(item))
    found = [text for text in texts if len(text) >= MIN_CHARACTERS][:count]
    if len(found) < count:
        sys.exit(f"there are texts for {len(found)} requests, not for {count}")
    return found


def changed(path: str, dtype: str, left_out: Sequence[str] = (), *, is_reference: bool = False) -> EngineConfig:
    """The config with another type and without some switches; the reference runs on the CPU, as it was traced."""
    config = EngineConfig.from_yaml(path)
    compiling: dict[str, Any] = {"disable_passes": tuple(name for name in left_out if name not in DECODE_KERNELS)}
    kernels = tuple(name for name in DECODE_KERNELS if name in left_out)
    runtime: dict[str, Any] = {"enable_prefix_cache": False, "without": kernels}
    if is_reference:
        compiling["backend"], runtime["device"] = "eager", "cpu"
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype}),
            "compile": config.compile.model_copy(update=compiling),
            "runtime": config.runtime.model_copy(update=runtime),
        }
    )


def difference(engine: Engine, reference: Engine, texts: Prompts, num_tokens: int) -> str:
    """Mean and largest, over the answers' tokens; with num_tokens 0 over the prompts'."""
    answers = engine.generate(texts, with_scores(max(1, num_tokens)))
    scored = [answer.prompt_token_ids + (answer.token_ids if num_tokens else []) for answer in answers]
    differences: list[float] = []
    for answer, truth in zip(answers, reference.generate(scored, with_scores(1)), strict=True):
        ours, theirs = answer_scores(answer) if num_tokens else prompt_scores([answer]), prompt_scores([truth])
        differences += [abs(a - b) for a, b in zip(ours, theirs[-len(ours) :], strict=True)]
    return f"{statistics.mean(differences):.4f}, {max(differences):.3f}"


def with_scores(num_tokens: int) -> SamplingParams:
    """Answers of so many tokens; with the log-probability of each, and of each of the prompt's."""
    scores = {"logprobs": 0, "prompt_logprobs": 0}
    return greedy(num_tokens, **scores)


def answer_scores(output: RequestOutput) -> list[float]:
    """Log-probability of every token of the answer."""
    entries = zip(output.outputs[0].logprobs or [], output.token_ids, strict=True)
    return [entry[token].logprob for entry, token in entries]


if __name__ == "__main__":
    with told_in_one_line():
        main()
