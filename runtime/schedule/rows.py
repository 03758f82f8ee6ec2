"""The rows of requests that run: whose each is, how far its tokens are computed, and which pages it holds.

A request has a row from its admission until it is finished or preempted. Its row is then *leaving*, until the last step
that was planned with it is over. This file also knows a request's keys and salt in the prefix cache, and how many of
its pages others may share. admission.py and lifecycle.py decide which request gets a row or gives one up. Read next:
pages/tables.py. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mllm_compile.runtime.schedule.batch_builder import NO_TOKENS
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.pages.tables import PageTables, StatePrefix
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.source_rows import SourceRows


class Rows:
    """Rows `first_row` to `first_row + config.max_running_requests - 1`.

    Attributes:
        most: their number.
        pages: their page tables, and the prefix cache.
        sources: the pages of what their encoder has read.
        computed: [rows] int32: tokens with KV, once all planned steps are over.
        last_computed: [rows] int32: `computed` after which a request gets no further step.
        in_flight: [rows] int32: planned steps that are not updated (Scheduler.finish_update).
        leaving: rows that get no further step and wait for the end of their last one.
        changes: grows when rows, pages or cached prefixes changed hands: what found no room before may find some now.
    """

    def __init__(self, config: SchedulerConfig, first_row: int = 1, keys_reach: int = 0) -> None:
        """Args: keys_reach: of a drafter's keys (speculation/drafter.py)."""
        num_rows = first_row + config.max_running_requests
        longest = max(config.max_tokens_per_request, config.max_source_len)
        max_pages = -(-longest // config.page_size)
        self._config, self.most, self._keys_reach = config, config.max_running_requests, keys_reach
        self.pages = PageTables(
            num_rows, max_pages, config.num_pages, config.page_size, config.num_snapshots, config.max_source_len > 0
        )
        self.sources = SourceRows(self.pages, num_rows, config.enable_prefix_cache)
        self.computed = np.zeros(num_rows, dtype=np.int32)
        self.last_computed = np.zeros(num_rows, dtype=np.int32)
        self.in_flight = np.zeros(num_rows, dtype=np.int32)
        self.leaving: set[int] = set()
        self.changes = 0
        self._owners: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, first_row - 1, -1))
        self._prefill_ids: list[np.ndarray] = [NO_TOKENS] * num_rows
        self._cache_keys: list[np.ndarray] = [NO_TOKENS] * num_rows  # what the prefix cache knows these by

    @property
    def num_free(self) -> int:
        """Rows that are nobody's."""
        return len(self._free)

    def prefill_ids(self, row: int) -> np.ndarray:
        """Tokens [n] int64 to compute before the row decodes: its prompt, and what it had put out when preempted."""
        return self._prefill_ids[row]

    def cache_keys(self, row: int) -> np.ndarray:
        """[n] int64: what the prefix cache knows prefill_ids by."""
        return self._cache_keys[row]

    def salt(self, request: Request) -> Salt:
        """Whatever else than tokens changes a request's keys and values: frequencies of RoPE too."""
        rope = self._config.rope
        return request.cache_salt if rope is None else (*request.cache_salt, rope.frequencies_of(request.rope_len))

    # --- a request gets a row -----------------------------------------------------------------------------------------

    def take(self, request: Request, spare_pages: int) -> StatePrefix | None:
        """Give a waiting request a free row, with its cached prefix.

        None: there are too few pages for all of its tokens and `spare_pages` more; nothing has changed.
        """
        row = self._free[-1]
        token_ids = request.all_token_ids
        is_text = request.media is None and request.source is None
        cache_keys = token_ids if is_text else request.cache_keys
        self._fit_rope(request, token_ids.size)
        prefix = StatePrefix(0, 0, None)
        if self.may_reuse(request):
            # Never all of it: the logits of the last token are what the request waits for.
            prefix = self._attach_prefix(row, cache_keys[:-1], self.salt(request))
        of_source = self.sources.attach(row, request, self.salt(request))
        needed = self.pages.pages_for(token_ids.size) - prefix.num_pages + of_source
        if needed + spare_pages > self.pages.available_pages:
            self.pages.release(row)
            self.sources.release(row, request)
            return None

        self._free.pop()
        self.sources.take(row, request, self.salt(request), of_source)
        self._owners[row] = request
        self._prefill_ids[row], self._cache_keys[row] = token_ids, cache_keys
        self.computed[row] = prefix.num_pages * self._config.page_size
        self.last_computed[row] = len(request.prompt_token_ids) + request.max_new_tokens - 1
        self.pages.write_prefix(row)
        request.row = row
        return prefix

    def may_reuse(self, request: Request) -> bool:
        """True if cached pages serve a request that waits."""
        return self._config.enable_prefix_cache and not request.needs_prompt_logprobs

    def prefix_of(self, request: Request) -> tuple[np.ndarray, Salt]:
        """The keys [n] int64 and the salt by which `take` looks for a request's cached prefix."""
        cache_keys = request.cache_keys
        self._fit_rope(request, cache_keys.size)
        return cache_keys[:-1], self.salt(request)

    def _fit_rope(self, request: Request, num_tokens: int) -> None:
        """Take the frequencies of RoPE that a request is computed with from now on."""
        rope = self._config.rope
        if rope is not None and rope.recomputes and request.rope_len <= rope.boundary < num_tokens:
            request.rope_len = num_tokens

    def _attach_prefix(self, row: int, token_ids: np.ndarray, salt: Salt) -> StatePrefix:
        if self._config.num_snapshots:
            return self.pages.attach_state_prefix(row, token_ids, salt)
        num_pages = self.pages.attach_prefix(row, token_ids, salt, self._keys_reach)
        return StatePrefix(num_pages, num_pages, None)

    # --- others may use its pages -------------------------------------------------------------------------------------

    @property
    def shares_pages(self) -> bool:
        """True if others may use pages that a request gives up."""
        return self._config.enable_prefix_cache

    def publish(self, request: Request) -> None:
        """Put the request's written full pages into the prefix cache while it goes on."""
        if self._config.enable_prefix_cache:
            tokens = self._cache_keys[request.row]
            self.pages.publish(request.row, tokens, self._num_shared(request), self.salt(request))
            self.changes += 1

    def forget_prefix(self, request: Request) -> None:
        """Take what the cache has of the request's prompt out of use: it may hold NaN."""
        if self._config.enable_prefix_cache:
            self.pages.forget(request.cache_keys, self.salt(request))
            self.sources.forget((request,))
            self.changes += 1

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests go on with the pages they hold."""
        self.pages.flush_cache()
        self.changes += 1

    def give_up_pages(self, request: Request) -> None:
        """Take the request's pages back; those worth it stay in the prefix cache. Those of a broken one are cleared."""
        row, num_shared, end = request.row, self._num_shared(request), None
        if request.is_broken:
            self.pages.discard(row)
        elif self._config.enable_prefix_cache and self.pages.has_unpublished(row, num_shared):
            end = self.pages.publish_and_release(row, request.cache_keys, num_shared, self.salt(request))
        else:
            end = self.pages.release(row)
        self.sources.release(row, request)
        self.changes += 1
        if end is not None and self.pages.cache.sessions.are_used:
            self._tag(end, request)

    def _tag(self, end: PageRun, request: Request) -> None:
        """Tell the cache's sessions of the path that a request has used."""
        path = list(self.pages.cache.path_of(end))
        starts = np.cumsum([0, *(run.pages.size for run in reversed(path))])[-2::-1]
        num_found = request.num_cached_tokens // self._config.page_size
        found = (starts < num_found).tolist()
        self.pages.cache.sessions.used(zip(path, found, strict=True), request.session, request.session_tag)

    def discard_own_pages(self, request: Request) -> None:
        """Take the request's pages back; those that it alone has are cleared, since they may hold NaN."""
        self.pages.discard_own(request.row)
        self.sources.release(request.row, request)
        self.changes += 1

    def _num_shared(self, request: Request) -> int:
        """The first of a request's written tokens whose keys and values are its salt's."""
        rope, num_written = self._config.rope, min(request.num_computed_tokens, request.num_alike)
        return num_written if rope is None else rope.num_alike(request.rope_len, num_written)

    # --- a row is given back ------------------------------------------------------------------------------------------

    def give_back(self, row: int) -> None:
        """Take back the row of a request that is finished or preempted, as soon as its last step is over."""
        if self.in_flight[row]:
            self.leaving.add(row)
        else:
            self._release(row)

    def release_idle(self) -> None:
        """Release the leaving rows whose last step is over."""
        if self.leaving:
            for row in [row for row in self.leaving if not self.in_flight[row]]:
                self._release(row)

    def pages_coming_back(self) -> int:
        """Pages that leaving rows give back for certain."""
        return sum(self.pages.private_pages(row) + self.sources.private_pages(row) for row in self.leaving)

    def begin_step(self, rows: Sequence[int] | np.ndarray) -> None:
        """Note a planned step of these rows."""
        self.in_flight[rows] += 1

    def end_step(self, rows: Sequence[int] | np.ndarray) -> None:
        """Note that a planned step is over; release_idle when its requests have their tokens."""
        self.in_flight[rows] -= 1

    def _release(self, row: int) -> None:
        """Take a row back with whatever pages it still holds."""
        request = self._owners[row]
        if request is None:
            raise RuntimeError(f"internal error: row {row} was released twice")
        if request.status is RequestStatus.FINISHED:
            self.give_up_pages(request)
        request.row = -1
        self._owners[row] = None
        self._prefill_ids[row] = self._cache_keys[row] = NO_TOKENS
        self.leaving.discard(row)
        self._free.append(row)
        self.changes += 1
