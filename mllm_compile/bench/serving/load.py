"""The load: requests that arrive at random, at each of several rates, and the figures of each rate."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.serving.client import Seen, Server
from mllm_compile.bench.serving.clients import Arrival, send_all
from mllm_compile.errors import ConfigError

FORMAT = 1
_QUANTILES = (0.5, 0.9, 0.99, 0.999)
_WORDS = ("list", "dict", "value", "return", "object", "method", "class", "module", "file", "string", "number", "key")
_TOKEN_IDS = 1000  # prompts are of the first ones, which every vocabulary has
_PATH = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class ServeWork:
    """The load that is asked for.

    Attributes:
        rates: requests a second; inf: all at once.
        requests: of each rate.
        input_words, output_tokens: of each request; words are a token or two.
        input_tokens: token ids of each prompt, in place of words; for a model without a tokenizer.
        concurrency: most requests at once, None: as they arrive.
        clients: processes that the requests come from.
        slo_ttft_s, slo_gap_s: a request is good whose first token and whose mean gap take no longer.
        seed: of arrivals and prompts.
    """

    rates: tuple[float, ...]
    requests: int = 100
    input_words: int = 256
    output_tokens: int = 128
    input_tokens: int | None = None
    concurrency: int | None = None
    clients: int = 1
    slo_ttft_s: float = 1.0
    slo_gap_s: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "input_words", "output_tokens", "input_tokens", "concurrency", "clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected at least 1")
        for name in ("slo_ttft", "slo_gap"):
            if not (value := getattr(self, f"{name}_s")) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected seconds above 0")
        if not self.rates or not all(rate > 0 for rate in self.rates):
            raise ConfigError("--rate: expected requests a second above 0, such as 1,4,16, or inf")
        most = self.requests if self.concurrency is None else min(self.requests, self.concurrency)
        if self.clients > most:
            raise ConfigError(f"--clients is {self.clients}; expected at most one a request at once, {most}")


@dataclass(frozen=True)
class RateResult:
    """The figures of one rate; times in seconds, quantiles by their names (p50, …).

    Attributes:
        good: share of all requests that kept both limits.
        errors: how many there were of each.
        gaps: between chunks that follow each other.
    """

    rate: float | None  # None: all at once
    seconds: float
    requests: int
    answered: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    good: float
    goodput: float  # good requests a second
    ttft: dict[str, float]
    gaps: dict[str, float]
    e2e: dict[str, float]
    errors: dict[str, int]


@dataclass(frozen=True)
class ServeResult:
    """All rates of a run."""

    server: str
    model: str
    work: dict[str, Any]
    rates: tuple[RateResult, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")


def run_load(url: str, api_key: str | None, work: ServeWork) -> ServeResult:
    """Runs every rate, one after another.

    Raises:
        BenchmarkError: there is no such server, or it answers nothing.
    """
    server = Server(url, api_key)
    model = asyncio.run(server.get("/v1/models"))["data"][0]["id"]
    warm = asyncio.run(server.stream(_PATH, _fields(model, prompts_of(work, -1)[0], work)))
    if warm.error is not None:
        raise BenchmarkError(f"{url} does not answer the first request: {warm.error}")
    rates = []
    for index, rate in enumerate(work.rates):
        begin, seen = send_all(url, api_key, _PATH, _arrivals(model, index, work), work.clients, work.concurrency)
        rates.append(figures(rate, max(one.ended for one in seen) - begin, seen, work))
    told = {**asdict(work), "rates": [None if math.isinf(rate) else rate for rate in work.rates]}
    return ServeResult(url, model, told, tuple(rates))


def prompts_of(work: ServeWork, index: int) -> list[str | list[int]]:
    """The prompts of a rate, by its number: others for each, which a prefix cache would otherwise know."""
    rng = random.Random(f"{work.seed} {index}")
    if work.input_tokens is None:
        return [" ".join(rng.choices(_WORDS, k=work.input_words)) for _ in range(work.requests)]
    return [rng.choices(range(_TOKEN_IDS), k=work.input_tokens) for _ in range(work.requests)]


def _arrivals(model: str, index: int, work: ServeWork) -> list[Arrival]:
    """The requests of a rate; the gaps between them are the same for all."""
    rng, rate, arrival = random.Random(work.seed), work.rates[index], 0.0
    arrivals = []
    for prompt in prompts_of(work, index):
        arrivals.append((arrival, _fields(model, prompt, work)))
        arrival += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return arrivals


def _fields(model: str, prompt: str | list[int], work: ServeWork) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": work.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def figures(rate: float, seconds: float, seen: Sequence[Seen], work: ServeWork) -> RateResult:
    """The figures of what the clients of one rate saw."""
    answered = [one for one in seen if one.error is None and one.chunks]
    errors: dict[str, int] = {}
    for one in seen:
        if one.error is not None or not one.chunks:
            name = (one.error or "no text")[:80]
            errors[name] = errors.get(name, 0) + 1
    gaps = [gap for one in answered for gap in np.diff(one.chunks).tolist()]
    good = sum(_is_good(one, work) for one in answered)
    output_tokens = sum(one.output_tokens for one in answered)
    return RateResult(
        rate=None if math.isinf(rate) else rate,
        seconds=seconds,
        requests=len(seen),
        answered=len(answered),
        prompt_tokens=sum(one.prompt_tokens for one in answered),
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / seconds,
        good=good / len(seen),
        goodput=good / seconds,
        ttft=_quantiles([one.chunks[0] - one.started for one in answered]),
        gaps=_quantiles(gaps),
        e2e=_quantiles([one.ended - one.started for one in answered]),
        errors=errors,
    )


def _is_good(seen: Seen, work: ServeWork) -> bool:
    if seen.chunks[0] - seen.started > work.slo_ttft_s:
        return False
    gap = (seen.chunks[-1] - seen.chunks[0]) / max(1, seen.output_tokens - 1)
    return gap <= work.slo_gap_s


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.quantile(np.array(values), _QUANTILES).tolist()
    return {f"p{q * 100:g}": value for q, value in zip(_QUANTILES, found, strict=True)}
