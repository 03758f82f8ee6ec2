"""Times the tokens of running answers while a long prompt comes in, through an engine's streams.

One event loop reads all streams. Two tokens that it finds together count as one: a gap is what a reader sees.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters.base import StreamEngine
from mllm_compile.bench.measure.workloads import Gaps, GapsWork, largest_token_id

# Tokens that each answer makes before its gaps count: until then prompts of the others come in.
_SETTLED = 4


def measure_gaps(engine: StreamEngine, work: GapsWork, vocab_size: int) -> list[Gaps]:
    """The work's repeats after one warm-up. Closes the engine.

    Raises:
        BenchmarkError: the answers ended before the prompt had its first token.
    """
    draw = random.Random(0)
    last = largest_token_id(vocab_size)

    def prompt(length: int) -> list[int]:
        return [draw.randint(0, last) for _ in range(length)]

    async def measure() -> list[Gaps]:
        try:
            return [await _gaps(engine, work, prompt) for _ in range(1 + work.repeats)][1:]
        finally:
            await engine.close()

    return asyncio.run(measure())


async def _gaps(engine: StreamEngine, work: GapsWork, prompt: Callable[[int], list[int]]) -> Gaps:
    alone: list[float] = []
    beside: list[float] = []
    # Made ahead: while the event loop draws tens of thousands of tokens it reads nothing.
    first_long, second_long = prompt(work.prompt_len), prompt(work.prompt_len)
    begin = time.perf_counter()
    await _read(engine, first_long, 2, alone)
    prompt_alone = alone[0] - begin

    answers: list[list[float]] = [[] for _ in range(work.decodes)]
    tasks = [asyncio.create_task(_read(engine, prompt(work.decode_len), work.answer_len, times)) for times in answers]
    try:
        await _until(answers, _SETTLED, tasks)
        settled = time.perf_counter()
        await _until(answers, work.tokens, tasks)
        sent = time.perf_counter()
        # Until its second token: the answers' tokens of the step with its first one may be read after that.
        await _read(engine, second_long, 2, beside)
        if any(task.done() for task in tasks):
            raise BenchmarkError(
                f"the answers of {work.answer_len} tokens ended before the prompt of {work.prompt_len} had its first; "
                "give a shorter --prompt-len, or a larger runtime.max_step_ms"
            )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [pair for times in answers for pair in pairwise(times)]
    return Gaps(
        alone=tuple(later - earlier for earlier, later in gaps if earlier >= settled and later <= sent),
        beside=tuple(later - earlier for earlier, later in gaps if later > sent and earlier < beside[0]),
        prompt_alone=prompt_alone,
        prompt_beside=beside[0] - sent,
    )


async def _read(engine: StreamEngine, prompt: list[int], max_tokens: int, times: list[float]) -> None:
    """Notes when each piece of an answer comes."""
    async for _ in engine.stream(prompt, max_tokens):
        times.append(time.perf_counter())


async def _until(answers: Sequence[list[float]], count: int, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits until each answer has come in `count` pieces; an answer that failed raises its error."""
    while min(map(len, answers)) < count:
        for task in tasks:
            if task.done():
                task.result()
                raise BenchmarkError(f"an answer ended in fewer than {count} pieces: its gaps mean nothing")
        await asyncio.sleep(0.001)
