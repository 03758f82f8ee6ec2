"""Gaps beside a prompt, of an engine whose tokens come when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.gaps import measure_gaps
from mllm_compile.bench.measure.workloads import GapsWork

STEP_S, PROMPT_S = 0.01, 0.1
WORK = GapsWork(decodes=3, decode_len=4, tokens=12, prompt_len=50, repeats=2)


class Stepwise:
    """A token a step; a prompt of 50 tokens holds all up for its time, or the answers end before it."""

    version, settings = "1", {}

    def __init__(self, answers_end: bool = False) -> None:
        self.answers_end = answers_end
        self.free = asyncio.Event()
        self.free.set()
        self.prompts: list[int] = []
        self.is_closed = False
        self.left = 0

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        self.prompts.append(len(prompt))
        try:
            if len(prompt) == WORK.prompt_len:
                self.free.clear()
                await asyncio.sleep(PROMPT_S)
                self.free.set()
            for made in range(max_tokens):
                await self.free.wait()
                yield 1
                await asyncio.sleep(STEP_S)
                if self.answers_end and made >= WORK.tokens and len(prompt) < WORK.prompt_len:
                    return
        finally:
            self.left += 1

    async def close(self) -> None:
        self.is_closed = True


def test_gaps_before_and_beside_the_prompt_are_told_apart() -> None:
    engine: Any = Stepwise()
    seen = measure_gaps(engine, WORK, vocab_size=100)
    assert len(seen) == 2
    for run in seen:
        assert len(run.alone) >= 3 * (WORK.tokens - 6) and len(run.beside) >= 3
        assert sorted(run.alone)[len(run.alone) // 2] >= 0.9 * STEP_S
        assert max(run.beside) >= 0.9 * PROMPT_S
        assert run.prompt_alone >= 0.9 * PROMPT_S and run.prompt_beside >= 0.9 * PROMPT_S
    assert engine.prompts == 3 * [50, 4, 4, 4, 50], "the prompt alone, the answers, the prompt beside them"
    assert engine.is_closed and engine.left == len(engine.prompts), "the answers were ended"


def test_answers_that_end_before_the_prompt_are_an_error() -> None:
    engine: Any = Stepwise(answers_end=True)
    with pytest.raises(BenchmarkError, match="ended before the prompt of 50 had its first"):
        measure_gaps(engine, WORK, vocab_size=100)
    assert engine.is_closed
