"""The prefix that a step's decodes have in common, as far as reading it once for all of them pays."""

from __future__ import annotations

from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.host_page_table import HostPageTable


class CommonPrefix:
    """See the module's header."""

    def __init__(self, runner: ModelRunner, pages: HostPageTable) -> None:
        self._pages, runtime = pages, runner.config.runtime
        is_on = runtime.cascade_attention and not runtime.deterministic and runner.dp_size == 1
        self._cascades = runner.attn_backend.cascades if is_on else None

    def num_tokens(self, batch: ScheduledBatch, is_captured: bool) -> int:
        """The first tokens of the step's decodes that are to be read once for all of them; 0: none.

        Args:
            is_captured: by a graph of the step, which was captured for it.
        """
        count, page_size = batch.num_decodes, self._pages.page_size
        if count < 2 or self._cascades is None:
            return 0
        most = int(batch.prefix_lens[:count].min()) // page_size
        pays = self._cascades.cascade_pays
        if not pays(count, most * page_size, is_captured):  # whatever they share
            return 0
        shared = self._pages.common_pages(batch.rows[:count], most) * page_size
        return shared if pays(count, shared, is_captured) else 0
