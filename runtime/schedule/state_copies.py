"""Copies of states before and after a step, for models whose layers carry one.

A request that begins with a cached prefix starts from that prefix's state. A chunk that ends where a state is worth
something keeps its own. That is at the end of a page, as pages are what the prefix cache shares. Which prefix has its
state in which row is known by pages/state_snapshots.py. For a model without states nothing here does anything. Free of
torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mllm_compile.runtime.schedule.batch_builder import NO_COPIES
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.pages.tables import StatePrefix
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.tiers.tiers import Tiers


class _Save(NamedTuple):
    """A copy of a request's state after `num_tokens`, made by a step in flight."""

    request: Request
    num_tokens: int
    state_row: int


class StateCopies:
    """The copies of the step that is being planned, and of steps in flight.

    Attributes:
        tiers: told of states that are kept; None: no config asks for memory behind them.
    """

    def __init__(self, config: SchedulerConfig, rows: Rows) -> None:
        self.tiers: Tiers | None = None
        self._rows = rows
        self._page_size = config.page_size
        self._num_snapshots = config.num_snapshots
        self._cuts: dict[int, tuple[int, ...]] = {}  # by row: where to cut its prompt for a state
        self._restores: list[tuple[int, int]] = []
        self._saves: list[_Save] = []
        self._saves_in_flight: dict[int, list[_Save]] = {}  # by step

    def begin(self, row: int, prefix: StatePrefix) -> None:
        """Note that a row starts with a cached prefix, or with none."""
        if self._num_snapshots:
            # At the last page that a prompt of the same beginning can reuse, and where more pages than states are.
            whole = (self._rows.prefill_ids(row).size - 1) // self._page_size
            self._cuts[row] = tuple(sorted(pages * self._page_size for pages in {prefix.num_matched, whole}))
        if prefix.state_row is not None:
            self._restores.append((prefix.state_row, row))

    def rows_to_read(self) -> set[int]:
        """Rows of snapshots that the step that is planned begins with."""
        return {state_row for state_row, _ in self._restores}

    def cut(self, row: int, start: int, length: int) -> int:
        """The length of a chunk that ends where a state is worth keeping: at a cut of its prompt.

        Without a cut it ends with a page, unless it is the last chunk.
        """
        if not self._num_snapshots:
            return length
        end, page_size = start + length, self._page_size
        end = next((cut for cut in self._cuts[row] if start < cut < end), end)
        whole = end // page_size * page_size
        return (whole if start < whole and end < self._rows.prefill_ids(row).size else end) - start

    def save(self, request: Request, num_tokens: int) -> None:
        """Plan to keep the request's state after `num_tokens`, the end of a chunk, if that is the end of a page.

        Never after a decode: a finished request may have run one too many.
        """
        if not self._num_snapshots or num_tokens % self._page_size:
            return
        state_row = self._rows.pages.cache.states.reserve()
        if state_row is not None:
            self._saves.append(_Save(request, num_tokens, state_row))

    def take(self, step_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The planned copies, which are this step's from now on: [N, 2] int64 (from, to) before it, and after it."""
        if not (self._restores or self._saves):
            return NO_COPIES, NO_COPIES
        if self._saves:
            self._saves_in_flight[step_id] = self._saves
        pairs = self._restores, [(save.request.row, save.state_row) for save in self._saves]
        self._restores, self._saves = [], []
        restores, saves = (np.array(one, dtype=np.int64).reshape(-1, 2) for one in pairs)
        return restores, saves

    def keep(self, step_id: int) -> None:
        """Keep the states that a step has copied, of requests that go on; others are not trusted."""
        for save in self._saves_in_flight.pop(step_id, ()):
            request = save.request
            if request.status is RequestStatus.RUNNING and save.num_tokens <= request.num_alike:
                tokens = self._rows.cache_keys(request.row)[: save.num_tokens]
                run = self._rows.pages.keep_state(tokens, self._rows.salt(request), save.state_row)
                if run is not None and self.tiers is not None:
                    self.tiers.state_kept(run)
            else:
                self._rows.pages.cache.states.release(save.state_row)

    def drop(self, step_id: int) -> None:
        """Forget the states that a lost step was to copy."""
        for save in self._saves_in_flight.pop(step_id, ()):
            self._rows.pages.cache.states.release(save.state_row)
