"""The images of steps that layers attend to: the tower runs on those that are new, and tokens learn what they see.

Used by one thread, in the order of steps.

Shape legend: R requests, T tokens.
"""

from __future__ import annotations

import numpy as np

from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.seen_images import SeenByTokens, StatesOfImages
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.sources.images import NO_IMAGES, SEES
from mllm_compile.runtime.step.host_page_table import HostPageTable


class ImageSteps:
    """See the module's header. Of another model it does nothing.

    Attributes:
        num_encoded: images that the tower has run on.
    """

    def __init__(self, runner: ModelRunner, pages: HostPageTable, num_rows: int) -> None:
        self._runner, self._pages, self._num_rows = runner, pages, num_rows
        images = runner.model.images
        self._states = None if images is None else StatesOfImages(images, runner.config.dtype, runner.device)
        self._pages_of_row = runner.req_to_token_pool.max_context_len // runner.config.runtime.page_size
        # By row, of tokens behind the prompt: the row of the table from each page, and states.
        self._table_rows = np.zeros(num_rows, dtype=np.int64)
        self._lens = np.ones(num_rows, dtype=np.int32)
        self.num_encoded = 0

    def encode(self, batch: ScheduledBatch) -> None:
        """Runs the tower on what the step's new requests bring; their pages are entered on the host."""
        if self._states is None:
            return
        for request in batch.admitted:
            self._table_rows[request.row], self._lens[request.row] = 0, 1
            if request.source is not None and (images := request.source.images) is not None:
                self._table_rows[request.row] = self._table_row(request.row, images.firsts[-1])
                self._lens[request.row] = images.lengths[-1]
        for request in batch.encoded:
            images = None if request.source is None else request.source.images
            if images is None:
                continue
            row = self._num_rows + request.row
            for image, (states, places) in zip(images.images, images.places, strict=True):
                slots = self._pages.slots(np.full_like(places, row), places)
                self._states.encode(image.pixels, image.grid, states, slots, self._runner.token_to_kv_pool)
                self.num_encoded += 1

    def are_in(self, batch: ScheduledBatch) -> bool:
        """True if a request of the step has images that layers attend to."""
        return self._states is not None and bool(self._table_rows[batch.rows].any())

    def seen(self, batch: ScheduledBatch) -> SeenByTokens | None:
        """The states that each of the step's tokens sees; None: no request of it has images."""
        if not self.are_in(batch):
            return None
        rows, lens = (np.repeat(of_row[batch.rows], batch.num_new) for of_row in (self._table_rows, self._lens))
        kinds = np.where(rows > 0, SEES, NO_IMAGES)
        at = batch.num_decode_tokens
        for place in range(batch.num_decodes, batch.num_requests):
            request, count = batch.requests[place], int(batch.num_new[place])
            images = None if request.source is None else request.source.images
            if images is not None:
                part = slice(at, at + count)
                kinds[part], firsts, lens[part] = images.of_tokens(int(batch.prefix_lens[place]), count)
                rows[part] = self._table_row(int(batch.rows[place]), firsts)
            at += count
        return SeenByTokens(kinds, rows, lens)

    def _table_row(self, row: int, first: np.ndarray) -> np.ndarray:
        """The row of the table from each page where states of a request begin, by the place of the first."""
        pages: np.ndarray = first // self._pages.page_size
        return (self._num_rows + row) * self._pages_of_row + pages
