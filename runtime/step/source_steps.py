"""The sources of steps: the encoder runs on those that are new, and a step's tokens learn how long theirs are.

Used by one thread, in the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.sources import SourceEncoder, most_states
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.sources.request import RequestSource
from mllm_compile.runtime.step.host_page_table import HostPageTable


class SourceSteps:
    """See the module's header. Of a model without an encoder it does nothing.

    Attributes:
        num_encoded: sources that the encoder has read.
    """

    def __init__(self, runner: ModelRunner, pages: HostPageTable, num_rows: int) -> None:
        self._runner, self._pages, self._num_rows = runner, pages, num_rows
        sources = runner.model.sources
        self._encoder = None if sources is None else SourceEncoder(sources, runner.config.dtype, runner.device)
        most = runner.config.runtime.max_num_batched_tokens
        self._most = most if sources is None else most_states(sources.facts, most)
        self._lens = np.zeros(num_rows, dtype=np.int32)  # by row
        self.num_encoded = 0

    def encode(self, batch: ScheduledBatch) -> None:
        """Runs the encoder on what the step's new requests bring, in parts; its pages are entered on the host."""
        if self._encoder is None:
            return
        if batch.admitted:
            self._enter(batch.admitted)
        for rows, sources in self._parts(batch.encoded):
            lengths = np.array([source.length for source in sources])
            starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
            slots = self._pages.slots(np.repeat(rows, lengths), np.arange(lengths.sum()) - starts)
            self._encoder.encode(sources, slots, self._runner.token_to_kv_pool)
            self.num_encoded += len(sources)

    def _enter(self, requests: Sequence[Request]) -> None:
        """Notes how long the sources of requests that got a row are, on the device too."""
        rows = np.array([request.row for request in requests], dtype=np.int64)
        lens = [1 if request.source is None else request.source.length for request in requests]
        self._lens[rows] = lens
        if self._runner.source_attention is not None:
            self._runner.source_attention.enter(rows, self._lens[rows])

    def lens(self, rows: np.ndarray) -> torch.Tensor | None:
        """[R] int32: states of the sources of requests in `rows`; None of a model without an encoder."""
        return None if self._encoder is None else torch.from_numpy(self._lens[rows])

    def _parts(self, requests: Sequence[Request]) -> Iterator[tuple[np.ndarray, list[RequestSource]]]:
        """The source rows and sources of each run, which have together at most so many states, or are one."""
        rows: list[int] = []
        sources: list[RequestSource] = []
        for request in requests:
            source = request.source
            if source is None:
                continue
            if sources and sum(one.length for one in sources) + source.length > self._most:
                yield np.array(rows), sources
                rows, sources = [], []
            rows.append(self._num_rows + request.row)
            sources.append(source)
        if sources:
            yield np.array(rows), sources
