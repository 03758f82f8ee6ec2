"""The log-probabilities of packed sequences, by the engine's own deterministic steps.

A step is a decode of rows, a token each, as the engine's are (runtime/step/plan.py): with padding where all its steps
are alike.
It has a rollout's kernels, shapes and log-softmax. So a token's number is bitwise the one that the engine reports,
however either cuts the sequence.

Shape legend: T tokens, N rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.device.cpu_threads import use_threads
from mllm_compile.runtime.memory_pool import TokenToKVPoolAllocator
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.sampling.logprobs import token_logprobs


class Scores(NamedTuple):
    """Numbers of packed sequences.

    Attributes:
        logprobs: [T] float32: each token's log-probability behind those before it; 0 for the first of a sequence.
        routes: [T, layers, k] int16, the experts that each chose; None without runtime.routed_experts.
    """

    logprobs: torch.Tensor
    routes: np.ndarray | None


class _Span(NamedTuple):
    """Tokens of one sequence in a step; `start` counts from the sequence's first token."""

    sequence: int
    start: int
    end: int


def pages_needed(config: RunnerConfig) -> int:
    """Pages of the KV cache for one long sequence and the short ones of a step, the dummy page included."""
    runtime = config.runtime
    long, short = (-(-count // runtime.page_size) for count in (runtime.max_model_len, runtime.max_num_batched_tokens))
    return 1 + long + short + min(runtime.max_running_requests, runtime.max_num_batched_tokens)  # each begins a page


class Scorer:
    """Scores packed sequences on an initialised runner. Used by one thread at a time.

    Args:
        prepare_threads: sets the CPU's threads as the engine has them.
    """

    def __init__(self, runner: ModelRunner, prepare_threads: Callable[[], None]) -> None:
        self._runner = runner
        self._prepare_threads = prepare_threads
        self._num_rows = runner.config.runtime.max_num_batched_tokens
        self._pads = not runner.config.runtime.any_rows
        self._most_sequences = runner.config.runtime.max_running_requests

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, lengths: Sequence[int], temperature: float) -> Scores:
        """
        Args:
            token_ids: [T] int64, sequence after sequence.
            lengths: of each sequence; their sum is T.
        """
        runner, starts = self._runner, np.cumsum([0, *lengths])
        targets = np.append(token_ids[1:], 0)
        scores = torch.zeros(len(token_ids) + 1, device=runner.device)
        tables, routes, kept = _Tables(runner), list[np.ndarray](), runner.expert_routes
        threads = torch.get_num_threads()
        self._prepare_threads()
        try:
            with runner.on_device():
                done = 0
                for spans in _steps(lengths, self._num_rows, self._most_sequences):
                    count = sum(span.end - span.start for span in spans)
                    part = slice(done, done + count)
                    rows, positions, slots = tables.enter(spans)
                    logits = self._logits(token_ids[part], rows, positions, slots)
                    factors = _factors(logits, temperature)
                    given = logits, self._padded(targets[part])
                    found = token_logprobs(*given, 0, factors, runner.model.sampling)
                    scores[done + 1 : done + count + 1] = found.logprobs[:count]
                    if kept is not None:
                        routes.append(kept.read(slots))
                    tables.leave([span.sequence for span in spans if span.end == lengths[span.sequence]])
                    done += count
        finally:
            use_threads(threads)
        scores[torch.from_numpy(starts).to(scores.device)] = 0.0
        return Scores(scores[:-1], np.concatenate(routes) if routes else None)

    def _logits(self, ids: np.ndarray, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Logits [N, V] of a step; rows of padding are the dummy row's only token."""
        runner, seq_lens = self._runner, np.ones(self._rows_of(positions), dtype=np.int32)
        seq_lens[: len(positions)] = positions + 1
        lens = torch.from_numpy(seq_lens)
        batch = runner.prepare_forward_batch_decode(
            self._padded(ids),
            self._padded(rows),
            lens.to(runner.device),
            self._padded(slots),
            seq_lens_cpu=lens,
            positions=self._padded(positions),
        )
        return runner.forward(batch).next_token_logits

    def _rows_of(self, values: np.ndarray) -> int:
        """N of a step of so many tokens."""
        return self._num_rows if self._pads else max(LEAST_ROWS, len(values))

    def _padded(self, values: np.ndarray) -> torch.Tensor:
        """[N] int64 on the device, zeros behind."""
        padded = np.zeros(self._rows_of(values), dtype=np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self._runner.device)


def _factors(logits: torch.Tensor, temperature: float) -> torch.Tensor | None:
    """[N]: by them a rollout's logits [N, V] are multiplied, so as to be divided by the temperature; None: not."""
    if temperature == 1.0:
        return None
    return torch.full(logits.shape[:1], temperature, device=logits.device).reciprocal()


def _steps(lengths: Sequence[int], num_rows: int, most_sequences: int) -> Iterator[list[_Span]]:
    """Cuts packed sequences into steps of at most so many tokens and sequences."""
    spans: list[_Span] = []
    room = num_rows
    for sequence, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            spans.append(_Span(sequence, start, end))
            room -= end - start
            start = end
            if not room or len(spans) == most_sequences:
                yield spans
                spans, room = [], num_rows
    if spans:
        yield spans


class _Tables:
    """Rows and pages of the sequences that are under way."""

    def __init__(self, runner: ModelRunner) -> None:
        pool = runner.token_to_kv_pool
        self._runner, self._page_size = runner, pool.page_size
        self._allocator = TokenToKVPoolAllocator(pool.num_pages, pool.page_size)
        self._free_rows = list(range(runner.config.runtime.max_running_requests, 0, -1))
        self._rows: dict[int, int] = {}
        self._pages: dict[int, np.ndarray] = {}

    def enter(self, spans: Sequence[_Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows, positions, slots), [tokens] int64 each, of a step's tokens; takes what they need."""
        rows, positions, slots = [], [], []
        for span in spans:
            if span.sequence not in self._rows:
                self._rows[span.sequence] = self._free_rows.pop()
                self._pages[span.sequence] = np.empty(0, dtype=np.int32)
            row = self._rows[span.sequence]
            pages = self._grown(span, row)
            places = np.arange(span.start, span.end)
            rows.append(np.full(len(places), row))
            positions.append(places)
            slots.append(pages[places // self._page_size].astype(np.int64) * self._page_size + places % self._page_size)
        return np.concatenate(rows), np.concatenate(positions), np.concatenate(slots)

    def _grown(self, span: _Span, row: int) -> np.ndarray:
        """The pages of a sequence up to the span's end, entered in the device's table."""
        before = self._pages[span.sequence]
        new = self._allocator.allocate(-(-span.end // self._page_size) - len(before))
        if new.size:
            device = self._runner.device
            ids = torch.from_numpy(new).long().to(device)
            places = torch.arange(len(before), len(before) + len(new), device=device)
            self._runner.req_to_token_pool.write_pages(torch.full_like(places, row), places, ids, self._page_size)
            self._pages[span.sequence] = np.concatenate((before, new))
        return self._pages[span.sequence]

    def leave(self, sequences: Sequence[int]) -> None:
        """Gives back what sequences have that are done."""
        for sequence in sequences:
            self._allocator.free(self._pages.pop(sequence))
            self._free_rows.append(self._rows.pop(sequence))
