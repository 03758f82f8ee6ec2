"""A comparison of answers behind loads with those behind hits of the prefix cache: the same bits of keys and values,
and of log-probabilities.

A hit of the same length has the same steps, of the same shapes. So any difference is of what was loaded. A request that
waits for a load runs beside others than one that does not: of those only the deterministic mode gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.script import greedy
from benchmarks.tiers.behind import drop_kv, kv_of
from mllm_compile import Engine
from mllm_compile.engine.outputs import RequestOutput

_OUT = 48
_CANDIDATES = 4  # whose log-probabilities are compared at each token


@dataclass(frozen=True, slots=True)
class Compared:
    """
    Attributes:
        alike, total: answers that are the same, and all.
        host_tokens: that came from the host's memory, of all answers behind it.
        lengths_alike: all were behind as many cached tokens as those that they are compared with.
    """

    alike: int
    total: int
    host_tokens: int
    lengths_alike: bool

    @property
    def is_right(self) -> bool:
        """All are the same, and something was loaded."""
        return self.alike == self.total and self.host_tokens > 0 and self.lengths_alike

    def __str__(self) -> str:
        lengths = "hits of the same lengths" if self.lengths_alike else "hits of OTHER lengths"
        return f"{self.alike} of {self.total} alike, {lengths}, {self.host_tokens} tokens of the host"


def compare_bits(engine: Engine, prompts: Sequence[list[int]]) -> tuple[int, int, int]:
    """Computes prompts, and loads them again.

    Returns:
        Layers whose keys, or values, differ in a bit; all of them; tokens that were loaded.
    """
    engine.generate(list(prompts), greedy(1), progress=False)
    before = kv_of(engine, prompts)
    drop_kv(engine)
    loaded = sum(output.num_host_tokens for output in engine.generate(list(prompts), greedy(1), progress=False))
    after = kv_of(engine, prompts)
    wrong = sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return wrong, len(before), loaded


def compare_alone(engine: Engine, prompts: Sequence[list[int]]) -> Compared:
    """Each prompt alone, behind a hit of the prefix cache and behind a load of the same length: tokens, and
    log-probabilities by their bits. Odd ones are without log-probabilities, on the shortest way of a step."""
    cached, behind = [], []
    for number, prompt in enumerate(prompts):
        params = greedy(_OUT) if number % 2 else greedy(_OUT, logprobs=_CANDIDATES)
        engine.generate([prompt], params, progress=False)
        cached += engine.generate([prompt], params, progress=False)
        drop_kv(engine)
        behind += engine.generate([prompt], params, progress=False)
    return _compared(cached, behind)


def compare_together(engine: Engine, prompts: Sequence[list[int]], others: Sequence[list[int]]) -> Compared:
    """Prompts and others in one batch behind hits of the prefix cache: of pages that were computed, and that were
    loaded for an earlier request of each."""

    def answers() -> tuple[list[RequestOutput], list[RequestOutput]]:
        first = [output for one in prompts for output in engine.generate([one], greedy(1), progress=False)]
        return first, engine.generate([*prompts, *others], greedy(_OUT), progress=False)

    answers()  # all is cached as far as it will be
    _, cached = answers()
    drop_kv(engine)
    loads, behind = answers()
    compared = _compared(cached, behind)
    loaded = sum(output.num_host_tokens for output in loads)
    return Compared(compared.alike, compared.total, loaded, compared.lengths_alike)


def compare_beside(engine: Engine, prompts: Sequence[list[int]], others: Sequence[list[int]]) -> Compared:
    """Prompts that wait for their loads while others run, and the same batch computed: for the deterministic mode."""
    engine.flush_prefix_cache()
    together = [*prompts, *others]
    computed = engine.generate(together, greedy(_OUT, logprobs=_CANDIDATES), progress=False)
    drop_kv(engine)
    behind = engine.generate(together, greedy(_OUT, logprobs=_CANDIDATES), progress=False)
    loaded = sum(output.num_host_tokens for output in behind)
    alike = sum(_bits(one) == _bits(other) for one, other in zip(computed, behind, strict=True))
    return Compared(alike, len(behind), loaded, lengths_alike=True)


def _compared(cached: Sequence[RequestOutput], behind: Sequence[RequestOutput]) -> Compared:
    pairs = list(zip(cached, behind, strict=True))
    return Compared(
        sum(_bits(one) == _bits(other) for one, other in pairs),
        len(pairs),
        sum(output.num_host_tokens for output in behind),
        all(one.num_cached_tokens == other.num_cached_tokens and not one.num_host_tokens for one, other in pairs),
    )


def _bits(output: RequestOutput) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Tokens, and the log-probabilities of each with the candidates'."""
    told = [] if output.logprobs is None else output.logprobs
    return output.token_ids, [[(token, one.logprob) for token, one in found.items()] for found in told]
