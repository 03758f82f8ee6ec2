"""Says which path a step takes: the one place that asks a batch what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.paths.base import StepParts, StepPath
from mllm_compile.runtime.step.paths.decodes import DecodePath
from mllm_compile.runtime.step.paths.forward import ForwardPath
from mllm_compile.runtime.step.paths.prompts import PromptPath
from mllm_compile.runtime.step.paths.verify import VerifyPath

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner


class StepPaths:
    """The paths of one runner's steps.

    Attributes:
        forward: takes any step.
    """

    def __init__(self, parts: StepParts, graphs: GraphRunner | None) -> None:
        self._planner, self._media, self._images = parts.planner, parts.media, parts.images
        self._is_in_step = np.zeros(
            len(parts.runner.req_to_token_pool.req_to_token), dtype=bool
        )  # False between two looks
        self.forward: StepPath = ForwardPath(parts)
        decodes = None if graphs is None else graphs.decodes
        prompts = None if graphs is None else graphs.prompts
        drafter = parts.runner.drafter
        self._reads_hidden_states = drafter is not None and drafter.model.reads_hidden_states
        self._most_decodes = 0 if decodes is None else decodes.most_requests
        self._decodes = self.forward if decodes is None else DecodePath(parts, decodes)
        self._prompts = None if prompts is None else PromptPath(parts, prompts)
        verifies = None if graphs is None else graphs.verifies
        self._verifies = None if verifies is None else VerifyPath(parts, verifies)

    def of(self, batch: ScheduledBatch) -> StepPath:
        """The path of a batch: captured verify steps, decodes or prompts, or the forward path."""
        if self._images.are_in(batch):
            return self.forward
        if batch.has_drafts and self._verifies is not None and self._verifies.serves(batch):
            return self._verifies
        if batch.has_drafts or self._reads_hidden_states:
            return self.forward
        if batch.num_decodes == batch.num_requests:
            count = self._planner.most_requests(batch)
            return self._decodes if count <= self._most_decodes and self._gets_own_pages(batch) else self.forward
        if self._prompts is None or batch.num_decodes or batch.prompt_logprob_rows.any():
            return self.forward
        return self.forward if self._media.has_images(batch) else self._prompts

    def _gets_own_pages(self, batch: ScheduledBatch) -> bool:
        """True if all new pages belong to requests of the step, not to an admitted one that waits for its first tokens.

        Captured decodes write only their own pages into the device's table.
        """
        if not batch.page_ids.size:
            return True
        self._is_in_step[batch.rows] = True
        is_own = bool(self._is_in_step[batch.page_rows].all())
        self._is_in_step[batch.rows] = False
        return is_own
