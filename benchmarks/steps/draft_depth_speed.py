"""Milliseconds a token without drafts, with drafts of 3 tokens and with those of a length by cost, by turns.

    python -m benchmarks.steps.draft_depth_speed configs/qwen.yaml [--method suffix] [--requests 1,8,64]
        [--new 160] [--rounds 5] [--processor-time] [--deterministic]

Greedy answers to prompts that repeat themselves, which a trained model goes on with, and draws by temperature 1 behind
random tokens, which nothing foretells. --processor-time counts the process's own time, where others load a CPU.

Answers are compared with those without drafts. Steps of another shape may round a near tie the other way. So of greedy
answers the log-probabilities of the two tokens at which they part are told. --deterministic sets
runtime.deterministic, where all answers are the same; the script ends where they are not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from benchmarks.script import greedy, parser_of, positive, positives, told_in_one_line
from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import ConfigError
from mllm_compile.process.progress import NullReporter

PROMPT_TOKENS = 240
PAGE_SIZE = 64  # what `auto` is on a GPU, so that runtimes of other scripts serve


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", help="a YAML, a model's folder or a hub id")
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--requests", type=positives, default=[1, 8, 64])
    parser.add_argument("--new", type=positive, default=160, help="tokens of an answer")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    config = config_or_runtime(args.config)
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"{args.config} is a compiled runtime, whose config it has; give its model")
    engines = {
        "none": engine_of(config, {"method": "none"}, args),
        "3": engine_of(config, {"method": args.method, "num_speculative_tokens": 3}, args),
        "auto": engine_of(config, {"method": args.method}, args),
    }
    clock = time.process_time if args.processor_time else time.perf_counter
    print("text | requests | drafts | ms a token | over none, median and spread | tokens a draft")
    for count in args.requests:
        for name in ("repeats", "new"):
            rounds = [text_of(name, count, args.new, seed) for seed in range(args.rounds + 1)]
            are_alike = report(f"{name} | {count}", engines, rounds, clock)
            if args.deterministic and not are_alike:
                sys.exit(f"deterministic answers differ ({name}, {count} requests)")


def engine_of(config: EngineConfig, speculative: dict[str, object], args: argparse.Namespace) -> Engine:
    """An engine with room for all requests at once, and without a prefix cache."""
    most = max(args.requests)
    length = PROMPT_TOKENS + args.new + 64
    sections = config.model_dump(exclude_unset=True)
    runtime = sections.get("runtime", {})
    runtime |= {
        "enable_prefix_cache": False,
        "deterministic": args.deterministic,
        "max_model_len": length,
        "max_running_requests": most,
        "page_size": PAGE_SIZE,
    }
    asked = EngineConfig.from_dict(sections | {"runtime": runtime, "speculative": speculative})
    return Engine.from_parts(assemble(asked, NullReporter(), num_pages=1 + most * (length // PAGE_SIZE + 2)))


Tokens = Sequence[list[int]]
Round = tuple[SamplingParams, list[list[int]]]


def text_of(name: str, count: int, num_new: int, seed: int) -> Round:
    """The parameters and prompts of a round; others in each, as past answers are remembered."""
    choose = random.Random(seed)
    length = 40 if name == "repeats" else PROMPT_TOKENS
    prompts = [[choose.randrange(300, 1000) for _ in range(length)] * (PROMPT_TOKENS // length) for _ in range(count)]
    if name == "repeats":
        return greedy(num_new), prompts
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=num_new, ignore_eos=True, detokenize=False), prompts


def report(label: str, engines: dict[str, Engine], rounds: list[Round], clock: Callable[[], float]) -> bool:
    """Prints a line of each engine, after a look whether answers are the same. The first round warms up.

    Returns:
        True if all are.
    """
    are_alike = True
    taken: dict[str, list[float]] = {name: [] for name in engines}
    before = {name: engine.stats() for name, engine in engines.items()}
    for params, prompts in rounds:
        expected: list[list[int]] = []
        for name, engine in engines.items():
            begin = clock()
            answers = [output.token_ids for output in engine.generate(prompts, params)]
            taken[name].append(clock() - begin)
            expected = expected or answers
            alike = sum(one == other for one, other in zip(answers, expected, strict=True))
            if alike < len(answers):
                are_alike = False
                told = f"{label} | {name}: {len(answers) - alike} of {len(answers)} answers differ"
                if params.temperature == 0:
                    apart = margins(engines["none"], prompts, answers, expected)
                    told += (
                        f", first at log-probabilities {statistics.median(apart):.4f} apart, at most {max(apart):.4f}"
                    )
                print(told)
    num_new = rounds[0][0].max_tokens or 1
    for name, engine in engines.items():
        ms = statistics.median(taken[name][1:]) * 1e3 / num_new
        ratios = [ours / plain for ours, plain in zip(taken[name][1:], taken["none"][1:], strict=True)]
        drafts = engine.stats().drafts - before[name].drafts
        accepted = engine.stats().accepted_tokens - before[name].accepted_tokens
        length = f"{1 + accepted / drafts:.2f} of {drafts}" if drafts else "-"
        spread = f"{min(ratios):.3f} … {max(ratios):.3f}"
        print(f"{label} | {name} | {ms:.3f} | {statistics.median(ratios):.3f} ({spread}) | {length}")
    return are_alike


def margins(engine: Engine, prompts: Tokens, answers: Tokens, others: Tokens) -> list[float]:
    """The distance of two log-probabilities behind one text, for each pair of answers that differ: those of the tokens
    at which they part, by the prompt's log-probabilities, which no draft has been near."""
    texts = []
    for prompt, one, other in zip(prompts, answers, others, strict=True):
        same = [token for token, _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=True))]
        if len(same) < len(one):
            texts += [[*prompt, *same, token] for token in (one[len(same)], other[len(same)])]
    scores = []
    for text, output in zip(texts, engine.generate(texts, greedy(1, prompt_logprobs=0)), strict=True):
        last = (output.prompt_logprobs or [None])[-1]
        scores.append(last[text[-1]].logprob if last else float("nan"))
    return [abs(one - other) for one, other in zip(scores[::2], scores[1::2], strict=True)]


if __name__ == "__main__":
    with told_in_one_line():
        main()
