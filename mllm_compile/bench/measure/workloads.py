"""Defines the work that engines are measured on, and the measurements that come out of its times.

The defaults are the project's benchmark (docs/benchmarks.md); every size can be scaled down for a small machine. All
of it is greedy or seeded, ignores the end-of-sequence token, and asks for no text. Free of torch: numbers in and out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mllm_compile.bench.measure.results import Measurement
from mllm_compile.bench.timing.rounds import quantile
from mllm_compile.errors import ConfigError

PromptIds = list[list[int]]

# Sizes by the names of a work's fields.
Sizes = Mapping[str, Any]

BATCHES = (1, 8, 64, 256)
INPUT_LEN = 512
OUTPUT_LEN = 129
REPEATS = 3
MIXED_REQUESTS = 256
MIXED_RANGE = (100, 1024)
MIXED_TEMPERATURE = 0.6
PREFILL_PROMPTS = 32
PREFILL_LEN = 2048
# Requests at once, tokens of each prompt.
LONG_POINTS = ((1, 2000), (1, 8000), (1, 32_000), (8, 16_000), (64, 4000), (32, 8000))
GAP_DECODES = 32
GAP_PROMPT_LEN = 32_000
IMAGE_BATCHES = (1, 8)
IMAGE_SIDE = 1024
IMAGE_TEXT_LEN = 100
START_PROMPT_LEN = 32
MAX_MODEL_LEN = 4096
WARM_STEPS = 5  # of decodes, before any is timed
_CPU_OUTPUT_LEN = 33
# Ids above this are rare or special in common vocabularies.
_LARGEST_TOKEN_ID = 10000


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an engine's generate.

    Attributes:
        prompts: token ids, or what an engine's `prompt` made of an image.
        max_tokens: tokens to generate, one number a prompt.
        temperature: 0 for greedy.
    """

    prompts: Sequence[Any]
    max_tokens: list[int]
    temperature: float = 0.0

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


# In each work, of_cpu are sizes for CPUs: a model that a CPU serves well is measured within a minute. sizes_text names
# the sizes of a run.


@dataclass(frozen=True, kw_only=True)
class LatencyWork:
    """`tpot` and `prefill` at several batch sizes.

    At batch b: b prompts of `input_len` random tokens. tpot is (time of generate with `output_len` new tokens − with 1)
    / (output_len − 1). Each time is the median of `repeats` after one warm-up. prefill is the 1-token generate.
    """

    batches: tuple[int, ...] = BATCHES
    input_len: int = INPUT_LEN
    output_len: int = OUTPUT_LEN
    repeats: int = REPEATS
    temperature: float = 0.0
    of_cpu: ClassVar[Sizes] = {"batches": (1, 8), "input_len": 64, "output_len": _CPU_OUTPUT_LEN}

    def __post_init__(self) -> None:
        _check("--batch", min(self.batches, default=0), 1)
        _check("--input-len", self.input_len, 1)
        _check("--output-len", self.output_len, 2)
        _check("--repeats", self.repeats, 1)

    @property
    def sizes_text(self) -> str:
        batches = " and ".join(map(str, self.batches))
        return f"batches of {batches}, prompts of {self.input_len} tokens, {self.output_len} new ones"

    @property
    def largest_batch(self) -> int:
        return max(self.batches)

    @property
    def longest_request(self) -> int:
        return self.input_len + self.output_len

    def calls(self, batch: int, vocab_size: int) -> tuple[Call, Call]:
        """(the 1-token call, the whole call) over the same prompts."""
        prompts = random_prompts(batch, self.input_len, vocab_size, seed=batch)
        first, whole = (
            Call(prompts=prompts, max_tokens=[count] * batch, temperature=self.temperature)
            for count in (1, self.output_len)
        )
        return first, whole

    def measurements(self, batch: int, first_s: list[float], whole_s: list[float]) -> list[Measurement]:
        """tpot and prefill in ms from the two calls' seconds, run in turns."""
        steps = self.output_len - 1
        pairs = [(whole - first) / steps * 1e3 for first, whole in zip(first_s, whole_s, strict=True)]
        prefill = Measurement.of("prefill", "ms", [seconds * 1e3 for seconds in first_s], batch=batch)
        whole = Measurement.of("whole", "ms", [seconds * 1e3 for seconds in whole_s], batch=batch)
        # By definition the difference of the medians; the pairs give the spread.
        tpot = Measurement.of("tpot", "ms", pairs, batch=batch, median=(whole.median - prefill.median) / steps)
        return [tpot, prefill]


@dataclass(frozen=True, kw_only=True)
class ThroughputWork:
    """`mixed` (256 requests of all lengths, submitted at once) and `prefill` (32 prompts of 2048, one new token)."""

    mixed_requests: int = MIXED_REQUESTS
    mixed_range: tuple[int, int] = MIXED_RANGE
    prefill_prompts: int = PREFILL_PROMPTS
    prefill_len: int = PREFILL_LEN
    repeats: int = REPEATS
    of_cpu: ClassVar[Sizes] = {
        "mixed_requests": 16,
        "mixed_range": (16, 128),
        "prefill_prompts": 4,
        "prefill_len": 512,
    }

    def __post_init__(self) -> None:
        _check("--requests", self.mixed_requests, 1)
        _check("--min-len", self.mixed_range[0], 1)
        _check("--max-len", self.mixed_range[1], self.mixed_range[0])
        _check("--prefill-prompts", self.prefill_prompts, 1)
        _check("--prefill-len", self.prefill_len, 1)
        _check("--repeats", self.repeats, 1)

    @property
    def sizes_text(self) -> str:
        shortest, longest = self.mixed_range
        mixed = f"{self.mixed_requests} requests of {shortest} to {longest} tokens"
        return f"{mixed}, {self.prefill_prompts} prompts of {self.prefill_len}"

    @property
    def mixed_name(self) -> str:
        return f"mixed{self.mixed_requests}"

    @property
    def prefill_name(self) -> str:
        return f"prefill{self.prefill_prompts}x{self.prefill_len}"

    @property
    def largest_batch(self) -> int:
        return max(self.mixed_requests, self.prefill_prompts)

    @property
    def longest_request(self) -> int:
        return max(2 * self.mixed_range[1], self.prefill_len + 1)

    def mixed_call(self, vocab_size: int) -> Call:
        """Draws all prompts first, then all output lengths, from one generator seeded with 0."""
        draw = random.Random(0)
        last = largest_token_id(vocab_size)
        prompts = [
            [draw.randint(0, last) for _ in range(draw.randint(*self.mixed_range))] for _ in range(self.mixed_requests)
        ]
        max_tokens = [draw.randint(*self.mixed_range) for _ in range(self.mixed_requests)]
        return Call(prompts=prompts, max_tokens=max_tokens, temperature=MIXED_TEMPERATURE)

    def prefill_call(self, vocab_size: int) -> Call:
        prompts = random_prompts(self.prefill_prompts, self.prefill_len, vocab_size, seed=1)
        return Call(prompts=prompts, max_tokens=[1] * self.prefill_prompts)

    def mixed_measurement(self, call: Call, seconds: list[float]) -> Measurement:
        return Measurement.of(self.mixed_name, "tok/s out", [call.num_output_tokens / s for s in seconds])

    def prefill_measurement(self, call: Call, seconds: list[float]) -> Measurement:
        return Measurement.of(self.prefill_name, "tok/s in", [call.num_input_tokens / s for s in seconds])


@dataclass(frozen=True, kw_only=True)
class LongWork:
    """`tpot` and `prefill` with long contexts: each point is (requests at once, tokens of each prompt).

    As LatencyWork; several prompts are told in input tokens a second.
    """

    points: tuple[tuple[int, int], ...] = LONG_POINTS
    output_len: int = OUTPUT_LEN
    repeats: int = REPEATS
    of_cpu: ClassVar[Sizes] = {"points": ((1, 256), (1, 1024), (4, 512)), "output_len": _CPU_OUTPUT_LEN}

    def __post_init__(self) -> None:
        _check("--points", min((min(point) for point in self.points), default=0), 1)
        _check("--output-len", self.output_len, 2)
        _check("--repeats", self.repeats, 1)
        if len(set(self.points)) < len(self.points):
            raise ConfigError("--points has one of them twice; expected each once")

    @property
    def sizes_text(self) -> str:
        return f"points {points_text(self.points)}, {self.output_len} new tokens"

    @property
    def largest_batch(self) -> int:
        return max(count for count, _ in self.points)

    @property
    def longest_request(self) -> int:
        return max(length for _, length in self.points) + self.output_len

    def latency(self, point: tuple[int, int]) -> LatencyWork:
        """The work of one point."""
        count, length = point
        return LatencyWork(batches=(count,), input_len=length, output_len=self.output_len, repeats=self.repeats)

    def measurements(self, point: tuple[int, int], first_s: list[float], whole_s: list[float]) -> list[Measurement]:
        """tpot in ms, and prefill in ms of one prompt, in tokens a second of several."""
        count, length = point
        tpot, prefill = self.latency(point).measurements(count, first_s, whole_s)
        if count > 1:
            prefill = Measurement.of("", "tok/s in", [count * length / seconds for seconds in first_s], batch=count)
        return [replace(tpot, name=f"tpot at {length}"), replace(prefill, name=f"prefill of {length}")]


@dataclass(frozen=True, kw_only=True)
class GapsWork:
    """Gaps between the tokens of running answers, alone and while one long prompt comes in, and that prompt's time.

    `decodes` requests of `decode_len` tokens run until each has made `tokens` tokens; then the prompt of `prompt_len`
    is sent. Before that it runs alone.
    """

    decodes: int = GAP_DECODES
    decode_len: int = INPUT_LEN
    tokens: int = 128
    prompt_len: int = GAP_PROMPT_LEN
    repeats: int = REPEATS
    of_cpu: ClassVar[Sizes] = {"decodes": 4, "prompt_len": 1024}

    def __post_init__(self) -> None:
        _check("--decodes", self.decodes, 1)
        _check("--decode-len", self.decode_len, 1)
        _check("--tokens", self.tokens, 2)
        _check("--prompt-len", self.prompt_len, 1)
        _check("--repeats", self.repeats, 1)

    @property
    def sizes_text(self) -> str:
        return f"{self.decodes} answers, a prompt of {self.prompt_len} tokens"

    @property
    def largest_batch(self) -> int:
        return self.decodes + 1

    @property
    def answer_len(self) -> int:
        """Most tokens of an answer: the prompt is over before, unless it gets few tokens of each step."""
        return self.tokens + max(256, self.prompt_len // 16)

    @property
    def longest_request(self) -> int:
        return max(self.prompt_len + 2, self.decode_len + self.answer_len)

    def measurements(self, seen: Sequence[Gaps]) -> list[Measurement]:
        """Median, p99 and longest gaps, and the prompt's times until its first token, in ms; a sample a repeat."""
        lines = []
        for name in ("alone", "beside"):
            gaps = [getattr(one, name) for one in seen]
            for label, share in (("median", 0.5), ("p99", 0.99), ("longest", 1.0)):
                samples = [quantile(of_run, share) * 1e3 for of_run in gaps]
                lines.append(Measurement.of(f"gap {name}, {label}", "ms", samples, batch=self.decodes))
        for name in ("alone", "beside"):
            samples = [getattr(one, f"prompt_{name}") * 1e3 for one in seen]
            lines.append(Measurement.of(f"prompt {name}", "ms", samples))
        return lines


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """The seconds of one run of GapsWork.

    Attributes:
        alone, beside: gaps of all answers, before the prompt was sent, and from then to its first token.
        prompt_alone, prompt_beside: from the sending of the prompt to its first token.
    """

    alone: tuple[float, ...]
    beside: tuple[float, ...]
    prompt_alone: float
    prompt_beside: float


@dataclass(frozen=True, kw_only=True)
class ImagesWork:
    """First tokens and `tpot` of prompts with one image each, beside text alone of the same length.

    At batch b: b requests at once, each an image of `side` × `side` pixels amid `text_len` random tokens. Their images
    are new to the engine, then the same with other text around. The model's processor is not part of any time.
    """

    batches: tuple[int, ...] = IMAGE_BATCHES
    side: int = IMAGE_SIDE
    text_len: int = IMAGE_TEXT_LEN
    output_len: int = OUTPUT_LEN
    repeats: int = REPEATS
    of_cpu: ClassVar[Sizes] = {"side": 64, "output_len": _CPU_OUTPUT_LEN}

    def __post_init__(self) -> None:
        _check("--batch", min(self.batches, default=0), 1)
        _check("--side", self.side, 1)
        _check("--text-len", self.text_len, 2)
        _check("--output-len", self.output_len, 2)
        _check("--repeats", self.repeats, 1)

    @property
    def sizes_text(self) -> str:
        return f"images of {self.side} × {self.side}, {self.output_len} new tokens"

    @property
    def largest_batch(self) -> int:
        return max(self.batches)

    def measurements(self, batch: int, seen: Mapping[str, list[float]]) -> list[Measurement]:
        """First tokens and tpot in ms.

        Args:
            seen: seconds by the names of measure/images.py, a number a repeat.
        """
        lines = [
            Measurement.of(first_token_of(name), "ms", [seconds * 1e3 for seconds in seen[name]], batch=batch)
            for name in ("new images", "same images", "text")
        ]
        steps = self.output_len - 1
        for name, first in (("behind images", "same images"), ("text", "text")):
            pairs = [
                (whole - one) / steps * 1e3 for whole, one in zip(seen[f"whole, {name}"], seen[first], strict=True)
            ]
            lines.append(Measurement.of(f"tpot, {name}", "ms", pairs, batch=batch))
        return lines


def first_token_of(prompts: str) -> str:
    """The name of the time until the first token of prompts of `bench images`: "new images", "same images", "text"."""
    return f"first token, {prompts}"


@dataclass(frozen=True, kw_only=True)
class StartupWork:
    """`start cold` and `start warm`: from a fresh process's first line to the first token of a 32-token prompt.

    cold: our caches, torch's, Triton's and the driver's are empty. warm: a second process with what the first cached.
    """

    repeats: int = REPEATS

    def __post_init__(self) -> None:
        _check("--repeats", self.repeats, 1)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Decode steps of several batch sizes, each request with `context` tokens; `steps` of each are profiled."""

    batches: tuple[int, ...] = (1,)
    context: int = INPUT_LEN + OUTPUT_LEN // 2  # a request of the latency work in the middle of its answer
    steps: int = 10

    def __post_init__(self) -> None:
        _check("--batch", min(self.batches, default=0), 1)
        _check("--context", self.context, 2)
        _check("--steps", self.steps, 1)

    @property
    def largest_batch(self) -> int:
        return max(self.batches)

    @property
    def longest_request(self) -> int:
        return self.context + 2 * self.steps + 16

    @property
    def prompt_len(self) -> int:
        """Tokens of each prompt, so that the requests have `context` when the profiled steps begin."""
        return max(1, self.context - self.steps_before)

    @property
    def steps_before(self) -> int:
        """Steps after the prompts that the profiler does not see: to warm up, and to be timed."""
        return WARM_STEPS + self.steps

    @property
    def all_steps(self) -> int:
        return self.steps_before + self.steps


def points_text(points: Sequence[tuple[int, int]]) -> str:
    """The points of LongWork as `bench long --points` takes them."""
    return ",".join(f"{count}x{length}" for count, length in points)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> PromptIds:
    """`count` prompts of `length` random token ids."""
    draw = random.Random(seed)
    last = largest_token_id(vocab_size)
    return [[draw.randint(0, last) for _ in range(length)] for _ in range(count)]


def largest_token_id(vocab_size: int) -> int:
    """The largest of the random ids, which begin at 0."""
    return min(_LARGEST_TOKEN_ID, vocab_size - 1)


def _check(option: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{option} is {value}; expected at least {least}")
