"""How long the next chunk of a prompt may be: by the budget of tokens and time, by pages, and by its images.

prompts.py chooses whose it is. Free of torch.
"""

from __future__ import annotations

import math

from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.image_cuts import with_whole_images
from mllm_compile.runtime.schedule.pace import Pace, PromptBudget
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows


class ChunkLengths:
    """Lengths of next chunks, in tokens."""

    def __init__(self, config: SchedulerConfig, rows: Rows, pace: Pace) -> None:
        self._config = config
        self._rows = rows
        self._pace = pace

    def rest(self, request: Request) -> int:
        """Tokens of a prompt that are not computed yet; of a waiting one all of them."""
        if request.status is RequestStatus.WAITING:
            return len(request.prompt_token_ids) + len(request.output_token_ids)
        return int(self._rows.prefill_ids(request.row).size) - int(self._rows.computed[request.row])

    def room(self, request: Request) -> int:
        """Tokens of a begun prompt that there are pages for."""
        row, pages = request.row, self._rows.pages
        free = pages.available_pages * self._config.page_size
        return int(pages.capacity[row]) + free - int(self._rows.computed[row])

    def of_first(self, request: Request, budget: PromptBudget) -> int:
        """The next chunk of the first prompt, pages aside: a page at least, however little time there is."""
        longest = max(budget.longest(int(self._rows.computed[request.row])), self._config.page_size)
        length = min(longest, budget.tokens, self.rest(request))
        return self.with_whole_images(request, length, budget.tokens)

    def of_cut(self, request: Request, budget: PromptBudget) -> int:
        """The same of a prompt that is cut, of a length that suits graphs and kernels; 0 where its next image is more
        than the budget."""
        chunk = self.of_first(request, budget)
        if math.isinf(budget.ms) or not chunk:
            return chunk
        others, context = self._config.max_num_batched_tokens - budget.tokens, int(self._rows.computed[request.row])
        bounds = min(chunk, self._config.page_size), min(budget.tokens, self.rest(request))
        return self._pace.cut(chunk, others, context, bounds, budget)

    def with_whole_images(self, request: Request, length: int, most: int) -> int:
        """A chunk of up to `length` that cuts no image which has to be whole; of up to `most` to have one whole."""
        return with_whole_images(request.media, int(self._rows.computed[request.row]), length, most)
