"""The changes that a step makes to the pools around its model: new pages, cleared pages, copied states.

The page table is on the host as of the launched step, and on the device. The device gets new pages with a step's inputs
or behind the step.
"""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.device.packed_fields import upload_fields
from mllm_compile.runtime.device.staging import StagingRing
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.data_parallel import copies_of_rank, pages_of_rank
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.data_parallel_plan import DataParallelStep
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step_fields import StepFields


class StepPools:
    """See the module's header. Used by one thread, in the order of steps."""

    def __init__(self, runner: ModelRunner, pages: HostPageTable, dp_step: DataParallelStep | None) -> None:
        """
        Args:
            dp_step: where ranks have requests of their own: this one has their pages and states alone.
        """
        self._runner, self._pages, self._dp_step = runner, pages, dp_step
        self._uploads = StagingRing(runner.device)
        self.pages_of, self.first_slot_in_a_row = pages.pages_of, pages.first_slot_in_a_row

    # Pages ------------------------------------------------------------------------------------------------------------

    def forget_rows(self, batch: ScheduledBatch) -> None:
        """Clears the device's table of rows that new requests get: where they have no page is the dummy page."""
        if batch.admitted:
            rows = np.array([request.row for request in batch.admitted], dtype=np.int64)
            self._runner.req_to_token_pool.req_to_token.index_fill_(0, upload(rows, self._runner.device), 0)

    def enter_pages(self, batch: ScheduledBatch) -> None:
        """Enters new pages on the host, and clears pages that held NaN or inf."""
        if batch.page_ids.size:
            self._pages.write(batch.page_rows, batch.page_positions, batch.page_ids)
        cleared, pool = batch.cleared_pages, self._runner.token_to_kv_pool
        if self._dp_step is not None:
            cleared = pages_of_rank(cleared, self._dp_step.rank, pool.num_pages)
        if cleared.size:
            pages = upload(cleared.astype(np.int64), self._runner.device)
            pool.clear_pages(pages)
            for drafter in self._runner.drafters:
                drafter.token_to_kv_pool.clear_pages(pages)

    def add_new_pages(self, fields: StepFields[np.ndarray], batch: ScheduledBatch) -> None:
        """Adds new pages to a step's inputs for the device."""
        if batch.page_ids.size:
            fields.page_places, fields.page_slots = self._new_pages(batch)

    def list_new_pages(self, fields: StepFields[torch.Tensor]) -> None:
        """Enters new pages, which came with a step's inputs, in the device's table."""
        if fields.page_places is not None and fields.page_slots is not None:
            self._runner.req_to_token_pool.write_page_slots(fields.page_places, fields.page_slots)

    def bring_new_pages(self, batch: ScheduledBatch) -> None:
        """Enters new pages in the device's table by a copy of their own, behind all that the step's tokens wait for."""
        if batch.page_ids.size:
            places, slots = self._new_pages(batch)
            pages = upload_fields({"page_places": places, "page_slots": slots}, self._uploads, self._runner.device)
            self._runner.req_to_token_pool.write_page_slots(pages["page_places"], pages["page_slots"])

    def _new_pages(self, batch: ScheduledBatch) -> tuple[np.ndarray, np.ndarray]:
        """(page_places, page_slots), as StepFields has them."""
        return self._pages.places_of(batch.page_rows, batch.page_positions), self._pages.slots_of(batch.page_ids)

    # States -----------------------------------------------------------------------------------------------------------

    def restore_states(self, restores: np.ndarray) -> None:
        """Copies states of prefixes to the requests that begin with them."""
        if restores.size:
            self._copy_states(restores, 1)

    def save_states(self, saves: np.ndarray) -> None:
        """Copies states of requests that are kept for others."""
        if saves.size:
            self._copy_states(saves, 0)

    def _copy_states(self, copies: np.ndarray, request_column: int) -> None:
        """Copies rows of states: [N, 2], from and to; a column has rows of requests."""
        if self._dp_step is not None:
            copies = copies_of_rank(copies, request_column, self._dp_step.rank, self._dp_step.rows_of_rank)
        if copies.size:
            self._runner.state_pool.copy_rows(copies)
