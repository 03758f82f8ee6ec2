"""A long, mixed load for soak tests: random lengths, parameters and aborts; checks what must hold of each answer."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.engine.streams import TokenStream
from tests.fakes import all_pages_are_back

_SHARED_PREFIX_SHARE = 0.3
_ABORT_EVERY = 10


@dataclass(frozen=True)
class SoakResult:
    """Results of a soak; `host_mib` and `device_mib` are the growth of memory over its second half."""

    finished: Counter[str]
    preemptions: int
    tokens: int
    seconds: float
    host_mib: float
    device_mib: float

    def __str__(self) -> str:
        return (
            f"{self.finished.total()} requests {dict(self.finished)}, {self.tokens} tokens in {self.seconds:.0f} s, "
            f"{self.preemptions} preemptions, second half {self.host_mib:+.1f} MiB host {self.device_mib:+.1f} MiB GPU"
        )


@dataclass(frozen=True)
class _Live:
    stream: TokenStream
    params: SamplingParams
    is_doomed: bool


def run_soak(
    engine: Engine,
    num_requests: int,
    vocab_size: int,
    *,
    max_prompt: int,
    max_output: int,
    in_flight: int,
    seed: int = 0,
) -> SoakResult:
    """Keeps `in_flight` requests in the engine until `num_requests` have ended, a tenth of them by an abort.

    Raises:
        AssertionError: an answer that is not what was asked for, or a page that does not come back.
    """
    rng = random.Random(seed)
    shared_prefix = [rng.randrange(vocab_size) for _ in range(max_prompt // 2)]
    before, start = engine.stats(), time.monotonic()
    finished: Counter[str] = Counter()
    live: list[_Live] = []
    num_tokens = num_sent = 0
    memory_half_way = (0.0, 0.0)
    while num_sent < num_requests or live:
        while num_sent < num_requests and len(live) < in_flight:
            prompt = _prompt(rng, vocab_size, shared_prefix, max_prompt)
            params = _params(rng, max_output)
            live.append(_Live(engine.stream(prompt, params), params, is_doomed=num_sent % _ABORT_EVERY == 0))
            num_sent += 1
            if num_sent == num_requests // 2:
                memory_half_way = _memory_mib()
        for request in live:  # waiting, amid its prompt or amid its answer
            if request.is_doomed and rng.random() < 0.2:
                engine.abort(request.stream.request_id)
        reason, count = _read(live.pop(0))
        finished[reason] += 1
        num_tokens += count
        if (count := finished.total()) % max(1, num_requests // 10) == 0:
            print(f"soak: {count} of {num_requests} requests after {time.monotonic() - start:.1f} s", flush=True)
    seconds = time.monotonic() - start
    growth = [now - then for now, then in zip(_memory_mib(), memory_half_way, strict=True)]
    assert all_pages_are_back(engine)
    after = engine.stats()
    assert sum(after.finished.values()) - sum(before.finished.values()) == num_requests
    return SoakResult(finished, after.preemptions - before.preemptions, num_tokens, seconds, *growth)


def _read(request: _Live) -> tuple[str, int]:
    """(finish reason, output tokens) once it is over."""
    token_ids: list[int] = []
    reason = None
    for output in request.stream:
        token_ids += output.token_ids
        reason = output.finish_reason
    if reason == "abort":
        assert request.is_doomed, "nobody aborted this one"
    else:
        count, params = len(token_ids), request.params
        assert reason in ("length", "stop"), reason
        assert count == params.max_tokens if reason == "length" else count <= params.max_tokens, (reason, count, params)
        assert count >= params.min_tokens, (reason, count, params)
    return reason, len(token_ids)


def _prompt(rng: random.Random, vocab_size: int, shared_prefix: list[int], max_prompt: int) -> list[int]:
    own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, max_prompt))]
    if rng.random() < _SHARED_PREFIX_SHARE:
        return (shared_prefix[: rng.randrange(len(shared_prefix))] + own)[:max_prompt]
    return own


def _params(rng: random.Random, max_output: int) -> SamplingParams:
    max_tokens = rng.randint(1, max_output)
    is_greedy = rng.random() < 0.5
    return SamplingParams(
        temperature=0.0 if is_greedy else rng.uniform(0.5, 1.5),
        top_p=1.0 if is_greedy else rng.choice([1.0, 0.9]),
        top_k=0 if is_greedy else rng.choice([0, 40]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        logprobs=rng.choice([None, None, 2]),
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        max_tokens=max_tokens,
    )


def _memory_mib() -> tuple[float, float]:
    """(resident memory of this process, memory that torch has handed out on the GPU)."""
    gc.collect()
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    device = torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
    return int(resident.split()[1]) / 1024, device
