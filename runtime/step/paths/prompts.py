"""Captured prompts: one launch up to the head, then the head and the choice of tokens. The graph reads its inputs from
the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.schedule.batch_builder import NO_COPIES
from mllm_compile.runtime.step.paths.base import Step, StepParts, StepPath
from mllm_compile.runtime.step.results import StepResults

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.prompts import PromptGraphs


class PromptPath(StepPath):
    """See the module's header. One rank alone has such graphs."""

    def __init__(self, parts: StepParts, graphs: PromptGraphs) -> None:
        super().__init__(parts)
        self._graphs = graphs

    def run(self, step: Step) -> StepResults | None:
        """Launches a step; None: no graph holds it, or the graph's kernels do not serve it well."""
        batch, fields = step.batch, step.plan.fields
        has_lora = self._add_adapters(batch, batch, step.plan)
        descriptor = self._graphs.find(batch.num_tokens, batch.prefix_lens, has_lora)
        if descriptor is None:
            return None
        starts = np.zeros(batch.num_requests + 1, dtype=np.int32)
        np.add.accumulate(batch.num_new, out=starts[1:])
        rows, seq_lens = batch.rows, batch.seq_lens
        state_rows, restores = _read_in_place(batch.state_restores, rows)
        prompts = StepPrompts(starts, batch.prefix_lens, rows, state_rows, lambda: self._pools.pages_of(rows, seq_lens))
        launched = self._graphs.launch(descriptor, fields, prompts)
        if launched is None:
            return None
        self._pools.restore_states(restores)
        placed, sampling = launched.fields, self._sampling
        assert placed.logits_indices is not None, "a plan that is no decode has some"
        try:
            output = launched.head(placed.logits_indices)
            sampling.follow_rows(batch)
            mask = sampling.mask(batch, step.plan)
            return sampling.sample(batch, step.plan, output, placed.sampled, placed, mask=mask)
        finally:  # the step can fail, and some of these pages belong to requests outside it
            self._pools.bring_new_pages(batch)

    def follow(self, step: Step) -> None:
        raise RuntimeError("internal error: prompts are captured on one rank alone")


def _read_in_place(restores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Requests at `rows` can read a prefix's state where it is, without a copy of their own.

    Args:
        restores: [N, 2], rows of prefixes' states and of requests.

    Returns:
        The rows whose states these requests go on from, and the restores of other requests. Those were admitted, and
        have no tokens in the step.
    """
    if not restores.size:
        return rows, restores
    # Lists: of as few rows arrays take several times as long, and the GPU waits.
    sources = {row: source for source, row in restores.tolist()}
    state_rows = np.array([sources.pop(row, row) for row in rows.tolist()], dtype=rows.dtype)
    rest = [(source, row) for row, source in sources.items()]
    return state_rows, np.array(rest, dtype=restores.dtype) if rest else NO_COPIES
