"""Tokens a second of many models behind one server: each alone, and all at once.

    python -m benchmarks.server.models_speed small=configs/qwen-shape.yaml*8 large=configs/qwen-8b-shape.yaml*2

NAME=CONFIG*COUNT stands for so many models of one config, NAME1, NAME2, …: each has an engine, weights and a KV cache,
and what is compiled is shared. Each is asked once to begin with, then alone, then all of them at once. An answer has to
be the same each time. With --max-awake the others are parked, and all at once is by turns.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.script import parser_of, positive
from benchmarks.server.switch_speed import Served, served
from mllm_compile.process.console import print_table

_PROMPT = [5, 6, 7, 8]
_MODELS = re.compile(r"([\w.-]+)=(.+?)(?:\*([1-9]\d?))?")
_BYTES = re.compile(r"^mllm:device_(given_)?bytes\{[^}]*\} (\S+)$", re.MULTILINE)


def models_of(text: str) -> list[tuple[str, str]]:
    """(name, config) of each model, for argparse."""
    found = _MODELS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=CONFIG or NAME=CONFIG*COUNT, with at most 99")
    name, config, count = found.groups()
    return [(name, config)] if count is None else [(f"{name}{one + 1}", config) for one in range(int(count))]


class Asked:
    """The models of a server.

    Args:
        num_tokens: of an answer.
    """

    def __init__(self, server: Served, num_tokens: int) -> None:
        self._server, self._num_tokens = server, num_tokens
        self._tokens: dict[str, list[int]] = {}  # of each model's first answer

    def seconds(self, model: str) -> float:
        """The time of an answer."""
        body = {"model": model, "prompt": _PROMPT, "max_tokens": self._num_tokens, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        status, answer = self._server.ask("POST", "/v1/completions", body | {"return_token_ids": True})
        taken = time.perf_counter() - began
        if status != 200:
            raise SystemExit(f"{model}: {answer}")
        tokens = answer["choices"][0]["token_ids"]
        if tokens != self._tokens.setdefault(model, tokens):
            raise SystemExit(f"{model}: its tokens are others than before: {tokens}")
        return taken


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="+", type=models_of, help="each as NAME=CONFIG or NAME=CONFIG*COUNT")
    parser.add_argument("--tokens", type=positive, default=256, help="of an answer (default: 256)")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--max-awake", type=positive)
    args = parser.parse_args()
    models = dict(one for some in args.models for one in some)
    if len(models) < sum(map(len, args.models)):
        parser.error("two models have the same name")
    bound = [] if args.max_awake is None else ["--max-awake", str(args.max_awake)]
    with served([f"{name}={config}" for name, config in models.items()], bound) as server:
        began = time.monotonic()
        states = server.wait()
        names = [name for name in models if states[name] != "failed"]
        print(f"{len(names)} of {len(models)} models served {time.monotonic() - began:.1f} s after the start: {states}")
        asked = Asked(server, args.tokens)
        first = {name: asked.seconds(name) for name in names}
        alone = {name: [asked.seconds(name) for _ in range(args.rounds)] for name in names}
        beside: dict[str, list[float]] = {name: [] for name in names}
        rounds = []
        with ThreadPoolExecutor(len(names)) as threads:
            for _ in range(args.rounds):
                began = time.perf_counter()
                for name, seconds in zip(names, threads.map(asked.seconds, names), strict=True):
                    beside[name].append(seconds)
                rounds.append(time.perf_counter() - began)
        rates = [{name: args.tokens / statistics.median(one[name]) for name in names} for one in (alone, beside)]
        rows = [(name, f"{1e3 * first[name]:.0f}", *(f"{one[name]:.1f}" for one in rates)) for name in names]
        print_table(sys.stdout, "tokens a second", ("model", "first, ms", "alone", "all at once"), rows)
        total = len(names) * args.tokens / statistics.median(rounds)
        print(f"all at once: {total:.0f} tokens a second, rounds of " + ", ".join(f"{one:.2f} s" for one in rounds))
        for given, count in _BYTES.findall(server.text("/metrics")):
            print(f"memory {'that models hold' if given else 'for all models'}: {float(count) / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
