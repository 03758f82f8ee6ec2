"""The requests that wait for a row, by urgency, and what one needs to get it.

It is admitted when a row is free, and there are pages for all of its prompt behind the cached prefix. While pages of it
are loaded from a tier it is left waiting. prompts.py decides whose turn it is. Free of torch.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort

from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.request import Request, RequestStatus, by_urgency
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.state_copies import StateCopies
from mllm_compile.runtime.schedule.tiers.tiers import Tiers


class Admission:
    """See the module's header.

    Attributes:
        waiting: requests without a row, new or preempted, by urgency.
        longest: tokens that the longest of them computes at most, or of some that have waited with them.
        queried_tokens: tokens of prompts that were looked up in the prefix cache.
        hit_tokens: the tokens among them that were found.
        recomputed_tokens: tokens that preempted requests had computed, less what they found again.
        tiers: the memory behind the prefix cache; None: no config asks for one.
    """

    def __init__(self, config: SchedulerConfig, rows: Rows, states: StateCopies) -> None:
        self.waiting: list[Request] = []
        self.longest = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.recomputed_tokens = 0
        self.tiers: Tiers | None = None
        self._config, self._rows, self._states = config, rows, states
        # Admission can only succeed anew after pages, rows or cached prefixes changed hands.
        self._blocked: tuple[Request, int] | None = None

    def add(self, request: Request) -> None:
        """Let a request wait."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self.longest = max(self.longest if self.waiting else 0, num_tokens)
        insort(self.waiting, request, key=by_urgency)

    def put_back(self, request: Request, num_computed: int) -> None:
        """Let a preempted request wait, which had computed so many tokens."""
        self.recomputed_tokens += num_computed
        self.add(request)

    def remove(self, request: Request) -> None:
        """Take a waiting request out of the queue."""
        self.waiting.pop(bisect_left(self.waiting, request.urgency, key=by_urgency))

    def is_ready(self, request: Request) -> bool:
        """False: a waiting request need not be tried now.

        Nothing has changed since it found too few pages. Or it was preempted and is in its old row, with a token on the
        way, which is part of what it must recompute.
        """
        return request.row < 0 and self._blocked != (request, self._rows.changes)

    def waits_for_load(self, tiers: Tiers, request: Request, num_running: int, of_begun: int) -> bool:
        """True if a waiting request is to be admitted when its pages are loaded, or have room; begins to load them.

        Args:
            tiers: those that are there.
            of_begun: pages that begun prompts will take.
        """
        if tiers.is_loading(request):
            return True
        if not self._rows.may_reuse(request):
            return False
        token_ids, salt = self._rows.prefix_of(request)
        num_needed = self._rows.pages.pages_for(token_ids.size + 1) + num_running
        return tiers.holds_back(request, token_ids, salt, num_needed, of_begun)

    def admit_first(self, request: Request, num_running: int) -> bool:
        """Admit the first in line. If it finds too few pages it is not ready until something has changed."""
        is_admitted = self.admit(request, num_running)
        if not is_admitted:
            self._blocked = (request, self._rows.changes)
        return is_admitted

    def admit(self, request: Request, num_running: int, set_aside: int = 0) -> bool:
        """Move a waiting request into a row with its cached prefix; False: too few pages for all of its prompt.

        Room for one more page for each running request is left, or the newcomer would soon be preempted again, and
        for `set_aside` further pages.
        """
        prefix = self._rows.take(request, set_aside + num_running)
        if prefix is None:
            return False
        self.remove(request)
        self._states.begin(request.row, prefix)
        cached = prefix.num_pages * self._config.page_size
        self._count(request, cached)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = cached
        return True

    def _count(self, request: Request, cached: int) -> None:
        """Count an admitted request's cached tokens, and where they came from."""
        from_host = from_disk = 0
        if self.tiers is not None:
            from_host, from_disk = self.tiers.count_hit(request, cached)
            self.tiers.leave(request)
        if request.num_preemptions:
            self.recomputed_tokens -= cached
            return
        request.scheduled_time = time.monotonic()
        request.num_cached_tokens, request.host_tokens, request.disk_tokens = cached, from_host, from_disk
        if self._config.enable_prefix_cache and not request.needs_prompt_logprobs:
            self.queried_tokens += len(request.prompt_token_ids)
            self.hit_tokens += cached
