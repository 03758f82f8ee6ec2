"""The cost of a form of the answer: time per token with and without it, and the masks' part of that.

    python -m benchmarks.steps.structured_speed configs/qwen-8b-shape.yaml [--requests 1 64]
        [--constrained 64] [--backend auto]

All requests decode when the time is taken; rounds with and without a form alternate. A model without a tokenizer gets
a made-up vocabulary of its size. The form is a JSON list of records that never ends, over random weights a hard one:
every token is about as likely as any other.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from functools import partial
from typing import Any

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.bench.timing.rounds import by_turns, quantile, spread
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.process.timeline import Timeline
from mllm_compile.structured.backend import Backend
from mllm_compile.structured.grammars import Grammars
from mllm_compile.structured.vocabulary import Vocabulary

WORD = {"enum": ["active", "inactive", "pending"]}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
        "status": WORD,
    },
    "required": ["name", "age", "tags", "status"],
    "additionalProperties": False,
}
FORM = StructuredOutputsParams(json={"type": "array", "minItems": 100_000, "items": RECORD})
WARM_UP_TOKENS = 8


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config")
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 64])
    parser.add_argument("--constrained", type=positive, help="how many of them have a form; by default all")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=128, help="decode steps of a round")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--backend", choices=("auto", "llguidance", "xgrammar"), default="auto")
    args = parser.parse_args()
    config = EngineConfig.from_yaml(args.config)
    asked = config.structured_outputs.model_copy(update={"backend": args.backend})
    config = config.model_copy(update={"structured_outputs": asked})
    parts = with_vocabulary(assemble(config, Timeline()))
    with Engine.from_parts(parts) as engine:
        meter = Meter(engine)
        print("requests | with a form | ms a token | without | with/without | spread | masks of a step, ms: p50 | p99")
        for count in args.requests:
            report(meter, count, min(args.constrained or count, count), args)


def with_vocabulary(parts: EngineParts) -> EngineParts:
    """The parts with a source of grammars, over a made-up vocabulary where the model has no tokenizer."""
    if parts.grammars is not None:
        return parts
    assert parts.config is not None, "assembled"
    asked, end = parts.config.structured_outputs, parts.vocab_size - 1
    vocabulary = Vocabulary.of(made_up_tokens(parts.vocab_size), {end})
    grammars = Grammars(lambda: vocabulary, asked.backends, asked.threads)
    return dataclasses.replace(parts, eos_token_ids=frozenset({end}), grammars=grammars)


def made_up_tokens(count: int) -> list[bytes]:
    """All bytes, JSON's marks as they come together, and words of letters, with and without a space before them."""
    chance = random.Random(0)
    tokens = dict.fromkeys(
        [bytes([byte]) for byte in range(256)] + [b'{"', b'":', b'",', b'": "', b'", "', b'"}', b"},"]
    )
    while len(tokens) < count:
        letters = bytes(chance.choices(b"etaoinshrdlucmfwypvbgkqjxz", k=chance.randint(2, 9)))
        tokens[(b" " if chance.random() < 0.5 else b"") + letters] = None
    return list(tokens)[:count]


class Meter:
    """Times rounds of decodes, and the masks that are made meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.mask_seconds: list[float] = []
        self._backends: set[int] = set()

    def watch(self, params: SamplingParams) -> None:
        """Compiles the form ahead, and times its backend's masks from now on."""
        assert params.structured_outputs is not None, "of a round with a form"
        backend: Any = self._engine.builder.grammars.compile(params.structured_outputs).masks
        if id(backend) not in self._backends:
            self._backends.add(id(backend))
            self._time(backend)

    def _time(self, backend: Backend) -> None:
        fill = backend.fill

        def timed(work, masks):
            watch = Stopwatch()
            try:
                return fill(work, masks)
            finally:
                self.mask_seconds.append(watch.seconds)

        backend.fill = timed

    def round(self, each: list[SamplingParams], prompt_length: int, num_tokens: int) -> float:
        """Milliseconds a token while all requests decode."""
        chance = random.Random(0)
        streams = [self._engine.stream([chance.randrange(1000) for _ in range(prompt_length)], one) for one in each]
        for stream in streams:
            next(stream)
        for _ in range(WARM_UP_TOKENS):
            next(streams[-1])
        watch = Stopwatch()
        for _ in range(num_tokens):
            next(streams[-1])
        seconds, running = watch.seconds, self._engine.stats().running
        if running < len(each):
            sys.exit(f"only {running} of {len(each)} requests still decode; raise runtime.max_model_len")
        for stream in streams:
            stream.close()
        return seconds / num_tokens * 1e3


def report(meter: Meter, count: int, num_formed: int, args: argparse.Namespace) -> None:
    # The last stream is read, and has no form where not all have one: a step ends for all at once.
    longest = args.tokens + 4 * WARM_UP_TOKENS + count
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=longest, detokenize=False, ignore_eos=True)
    formed = dataclasses.replace(plain, ignore_eos=False, structured_outputs=FORM)
    meter.watch(formed)
    modes = {False: [plain] * count, True: [formed] * num_formed + [plain] * (count - num_formed)}
    meter.round(modes[True], args.prompt, WARM_UP_TOKENS)
    meter.mask_seconds.clear()
    takes = {has_form: partial(meter.round, each, args.prompt, args.tokens) for has_form, each in modes.items()}
    times = by_turns(takes, args.rounds, warm_ups=0)
    without, with_form = (statistics.median(times[has_form]) for has_form in (False, True))
    widest = max(map(spread, times.values()))
    p50, p99 = (quantile(meter.mask_seconds, share) * 1e3 for share in (0.5, 0.99))
    ratio = with_form / without
    print(
        f"{count:8} | {num_formed:11} | {with_form:10.3f} | {without:7.3f} | {ratio:12.3f} | {widest:6.1%}", end=" | "
    )
    print(f"{p50:26.3f} | {p99:5.3f}")


if __name__ == "__main__":
    with told_in_one_line():
        main()
