"""Decides which requests run in the next step, and what becomes of them when its tokens are known.

The policy: decodes first, then chunks of prompts under the budget (tokens, and beside decodes time: pace.py), then
admissions, most urgent first (priority, then arrival). A prompt that the budget cuts leaves up to half of it to shorter
ones behind it, the shortest first. When pages run out the least urgent running request is preempted and later
recomputed. The most urgent running request always moves, and the most urgent prompt always gets half of a step, which
is why nothing starves.

Overlap: schedule() for step n+1 may come before update() for step n. It assumes that every request goes on unless its
length ends it, which the host can count. A request found finished while a later step of its own is in flight keeps its
row and pages until that step's update, which drops that step's token. A preempted one gives up its pages at once
(steps run in order on one stream), keeps its row until its last step is over, and keeps that step's token.

Read first: request.py, scheduled_batch.py, page_tables.py, pace.py. Single-threaded; free of torch. R rows of a step.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.schedule.batch_builder import NO_COPIES, NO_DECODES, NO_TOKENS, Chunk, DecodeRows, build_batch
from mllm_compile.runtime.schedule.config import SchedulerConfig, SchedulerStats
from mllm_compile.runtime.schedule.pace import Pace, PromptBudget
from mllm_compile.runtime.schedule.page_tables import PageTables, StatePrefix
from mllm_compile.runtime.schedule.prefix_cache import Salt
from mllm_compile.runtime.schedule.request import FINISH_REASONS, Request, RequestStatus
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, UpdateResult

_URGENCY = attrgetter("urgency")
# How far behind the first in line a shorter prompt is looked for: it bounds the host's work of a step.
_LOOKED_AT = 256


class _Save(NamedTuple):
    """A copy of a request's state after `num_tokens`, made by a step in flight."""

    request: Request
    num_tokens: int
    state_row: int


class Scheduler:
    """Continuous batching with chunked prefill, prefix cache and preemption. See the module's header."""

    def __init__(self, config: SchedulerConfig, first_row: int = 1, sequences: Iterator[int] | None = None) -> None:
        """
        Args:
            first_row: of its requests, which have as many rows as config.max_running_requests says.
            sequences: their numbers, where others draw of them too.
        """
        self.config = config
        num_rows = first_row + config.max_running_requests
        max_pages = -(-config.max_tokens_per_request // config.page_size)
        self.pages = PageTables(num_rows, max_pages, config.num_pages, config.page_size, config.num_snapshots)
        self._pace = Pace(config.max_step_ms, config.step_sizes, config.query_blocks, config.divide_prefix)

        self._requests: set[Request] = set()  # all that are not finished
        self._waiting: list[Request] = []  # by urgency
        self._prefilling: list[Request] = []  # by urgency
        self._decoding: list[Request] = []
        self._decode_rows: DecodeRows | None = None  # of _decoding; None: to be made anew

        self._owners: list[Request | None] = [None] * num_rows  # by row
        self._free_rows = list(range(num_rows - 1, first_row - 1, -1))
        self._leaving: set[int] = set()  # rows that get no further step and wait for their last one's update
        self._prefill_ids: list[np.ndarray] = [NO_TOKENS] * num_rows  # tokens to prefill, by row
        self._cache_keys: list[np.ndarray] = [NO_TOKENS] * num_rows  # what the prefix cache knows these by
        self._features_left = 0  # of images, that the step which is being planned may need beside those it does
        # For each row, once all scheduled steps are over: tokens with KV, their number after which no step is left,
        # and the steps not updated yet.
        self._computed = np.zeros(num_rows, dtype=np.int32)
        self._last_computed = np.zeros(num_rows, dtype=np.int32)
        self._in_flight = np.zeros(num_rows, dtype=np.int32)
        # States of prefixes: where to cut each row's prompt for one, and the copies of the step that is being planned.
        self._cuts: list[tuple[int, ...]] = [()] * num_rows
        self._restores: list[tuple[int, int]] = []
        self._saves: list[_Save] = []
        self._saves_in_flight: dict[int, list[_Save]] = {}  # by step

        self._sequences = itertools.count() if sequences is None else sequences
        self._next_step = 0
        self._next_update = 0
        # Admission can only succeed anew after pages, rows or cached prefixes changed hands.
        self._changes = 0
        self._blocked: tuple[Request, int] | None = None
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._preemptions = 0
        self._recomputed_tokens = 0

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request; sets its sequence and max_new_tokens (max_tokens clipped to max_model_len).

        Raises:
            RequestError: the prompt is empty, or it could never fit.
        """
        request.max_new_tokens = self.config.max_new_tokens(len(request.prompt_token_ids), request.params.max_tokens)
        if request.media is not None and request.media.sees_ahead:
            self.config.check_whole_images(request.media)
        if self.config.rope is not None:
            request.rope_len = len(request.prompt_token_ids)
        request.sequence = next(self._sequences)
        self._requests.add(request)
        insort(self._waiting, request, key=_URGENCY)

    def abort(self, request: Request) -> bool:
        """End a request with finish_reason 'abort'. False: it has ended already."""
        return self.finish(request, "abort")

    def finish(self, request: Request, reason: str = "stop", stop_reason: int | str | None = None) -> bool:
        """End a request from outside, as for a stop string in its text. False: it has ended already.

        A token of its that is in flight is dropped; row and pages come back once that step is updated.
        """
        if reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {reason!r}; expected one of {', '.join(FINISH_REASONS)}")
        if request not in self._requests:
            return False
        self._end(request, reason, stop_reason)
        return True

    def has_work(self) -> bool:
        """Requests that are not finished, or finished ones whose last step is still in flight."""
        return bool(self._requests or self._leaving)

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests go on with the pages they hold."""
        self.pages.flush_cache()
        self._changes += 1

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._requests) - len(self._waiting),
            waiting=len(self._waiting),
            pages_total=self.config.usable_pages,
            pages_used=self.pages.held_pages,
            pages_cached=self.pages.cache.num_pages,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed_tokens,
            snapshots_kept=self.pages.cache.states.num_kept,
            snapshots_total=self.config.num_snapshots,
            step_bound_ms=self._pace.last_bound_ms,
        )

    # --- a step is planned --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step; None when nothing can run now (no work, or an update must come first).

        The batch is to be run before the next one, on one stream, and then handed to update() or fail().
        """
        self._preempt_outgrown()
        decodes = self._plan_decodes()
        prefix_lens = self._computed[decodes.rows] if decodes.requests else NO_DECODES.rows
        chunks: list[Chunk] = []
        admitted: list[Request] = []
        self._features_left = self.config.max_features_per_step
        if self._prefilling or (self._waiting and self._free_rows):
            budget = self._prompt_budget(decodes)
            self._continue_prefills(chunks, admitted, budget)
            self._admit(chunks, admitted, budget)
        if not decodes.requests and not chunks:
            self._check_not_stuck()
            return None
        if decodes.requests:
            self._computed[decodes.rows] += 1
        changes = (*self._page_changes(), admitted, *self._take_state_copies())
        batch = build_batch(self._next_step, decodes, prefix_lens, chunks, *changes)
        self._next_step += 1
        self._in_flight[batch.rows] += 1
        return batch

    def _page_changes(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        return self.pages.take_writes(), self.pages.take_cleared()

    def _take_state_copies(self) -> tuple[np.ndarray, np.ndarray]:
        """The copies of states before and after the step."""
        if not (self._restores or self._saves):
            return NO_COPIES, NO_COPIES
        if self._saves:
            self._saves_in_flight[self._next_step] = self._saves
        pairs = self._restores, [(save.request.row, save.state_row) for save in self._saves]
        self._restores, self._saves = [], []
        restores, saves = (np.array(one, dtype=np.int64).reshape(-1, 2) for one in pairs)
        return restores, saves

    def _preempt_outgrown(self) -> None:
        """Send back to the queue what the next step would take beyond the frequencies of its cached keys, where those
        are computed anew."""
        rope = self.config.rope
        if rope is None or not rope.recomputes:
            return
        decodes = self._current_decodes()
        for index in np.flatnonzero(self._computed[decodes.rows] == rope.boundary).tolist():
            if decodes.requests[index].rope_len <= rope.boundary:
                self._preempt(decodes.requests[index])

    def _plan_decodes(self) -> DecodeRows:
        """The decodes of this step, each with room for its token; preempts, or lets some sit out, when pages lack."""
        while True:
            decodes = self._current_decodes()
            if not decodes.requests and not self._prefilling:
                return decodes
            needy = self._computed[decodes.rows] == self.pages.capacity[decodes.rows]
            num_needy = int(np.count_nonzero(needy))
            if num_needy == 0 and not self._prefilling:
                return decodes
            shortage = num_needy - self.pages.available_pages
            shortage_with_prefill = shortage + self._first_prefill_need(decodes)
            if shortage_with_prefill <= 0:
                break
            victim = self._preemption_victim()
            if shortage <= 0 and victim is self._prefilling[0]:
                break  # the prompt itself is the least urgent: it takes what pages the decodes leave
            if victim is None or shortage_with_prefill <= self._pages_coming_back():
                decodes = self._sit_out(decodes, needy)
                needy = self._computed[decodes.rows] == self.pages.capacity[decodes.rows]
                break
            self._preempt(victim)
        self.pages.grow_each(decodes.rows[needy])
        return decodes

    def _current_decodes(self) -> DecodeRows:
        """All requests in decode with steps left: cached until the set changes.

        Those whose last step has been planned leave `_decoding` here, and their rows join `_leaving`.
        """
        decodes = self._decode_rows
        if decodes is None:
            decoding = [request for request in self._decoding if request.status is RequestStatus.RUNNING]
            decodes = self._set_decoding(self._longest_first(decoding) if len(decoding) > 1 else decoding)
        if not decodes.requests:
            return decodes
        done = self._computed[decodes.rows] >= self._last_computed[decodes.rows]
        if done.any():
            # Their last step is in flight; its update ends them.
            self._leaving.update(decodes.rows[done].tolist())
            left = [r for r, is_done in zip(decodes.requests, done.tolist(), strict=True) if not is_done]
            decodes = self._set_decoding(left)
        return decodes

    def _set_decoding(self, requests: list[Request]) -> DecodeRows:
        self._decoding = requests
        self._decode_rows = DecodeRows.of(requests) if requests else NO_DECODES
        return self._decode_rows

    def _longest_first(self, requests: list[Request]) -> list[Request]:
        """Sorts for attention: its blocks begin in this order, and a long one that begins last is waited for alone.

        All grow alike from then on, but for those that sit out.
        """
        rows = np.array([request.row for request in requests], dtype=np.int32)
        order = np.argsort(-self._computed[rows], kind="stable")
        return [requests[index] for index in order.tolist()]

    def _prompt_budget(self, decodes: DecodeRows) -> PromptBudget:
        """The part of a step that prompts may take beside these decodes."""
        num_decodes = len(decodes.requests)
        decode_keys = int(self._computed[decodes.rows].sum()) + num_decodes if num_decodes else 0
        return self._pace.budget(num_decodes, decode_keys, self.config.max_num_batched_tokens - num_decodes)

    def _first_prefill_need(self, decodes: DecodeRows) -> int:
        """Pages that the most urgent unfinished prompt lacks for its next chunk."""
        if not self._prefilling:
            return 0
        row = self._prefilling[0].row
        computed = int(self._computed[row])
        chunk = self._first_chunk(self._prefilling[0], self._prompt_budget(decodes))
        return max(0, self.pages.pages_for(computed + chunk) - int(self.pages.num_pages[row]))

    def _preemption_victim(self) -> Request | None:
        """The least urgent running request; None when there is but one."""
        running = self._prefilling + self._decoding
        return max(running, key=_URGENCY) if len(running) > 1 else None

    def _pages_coming_back(self) -> int:
        return sum(self.pages.private_pages(row) for row in self._leaving)

    def _sit_out(self, decodes: DecodeRows, needy: np.ndarray) -> DecodeRows:
        """Leave out the least urgent of the decodes that need a page, as many as pages lack; theirs come soon."""
        without_page = sorted(
            (request for request, needs in zip(decodes.requests, needy.tolist(), strict=True) if needs), key=_URGENCY
        )[self.pages.available_pages :]
        out = set(without_page)
        return DecodeRows.of([request for request in decodes.requests if request not in out]) if out else decodes

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue; its pages come back at once, but for those worth caching."""
        row = request.row
        self._preemptions += 1
        self._recomputed_tokens += int(self._computed[row])
        request.num_preemptions += 1
        self._leave_running(request)
        self._give_up_pages(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        insort(self._waiting, request, key=_URGENCY)
        self._release_or_leave(row)

    def _continue_prefills(self, chunks: list[Chunk], admitted: list[Request], budget: PromptBudget) -> None:
        """Plan chunks of the prompts begun before."""
        for request in list(self._prefilling):
            if budget.tokens > 0:
                self._serve(chunks, admitted, request, budget)

    def _admit(self, chunks: list[Chunk], admitted: list[Request], budget: PromptBudget) -> None:
        """Give rows to waiting requests, strictly in their order, as long as their prompts' pages are there."""
        while self._waiting and self._free_rows and budget.tokens > 0:
            request = self._waiting[0]
            # A preempted one still in its old row has a token on the way, which is part of what it must recompute.
            if request.row >= 0 or self._blocked == (request, self._changes):
                break
            if not self._try_admit(request):
                self._blocked = (request, self._changes)
                break
            admitted.append(request)
            self._serve(chunks, admitted, request, budget)

    def _serve(self, chunks: list[Chunk], admitted: list[Request], request: Request, budget: PromptBudget) -> None:
        """Plan the next chunk of a prompt: all of it if the budget holds that, else with shorter ones beside it.

        After a cut the budget is used up.
        """
        if self._was_cut(chunks, request):
            return
        rest, longest = self._rest(request), self._first_chunk(request, budget)
        is_cut = longest < rest
        if is_cut:
            self._serve_shorter(chunks, admitted, request, budget)
            longest = self._rounded_chunk(request, budget)
        room = self._room(request)
        if room > 0:
            self._plan_chunk(chunks, request, min(longest, room), budget, most=min(budget.tokens, room))
        if is_cut:  # though rounding may have made it whole: those served beside it have had their chunk
            budget.tokens = 0

    def _rest(self, request: Request) -> int:
        """Tokens of a prompt that are not computed yet; of a waiting one all of them."""
        if request.status is RequestStatus.WAITING:
            return len(request.prompt_token_ids) + len(request.output_token_ids)
        return int(self._prefill_ids[request.row].size) - int(self._computed[request.row])

    def _room(self, request: Request) -> int:
        """Tokens of a begun prompt that there are pages for."""
        row = request.row
        free = self.pages.available_pages * self.config.page_size
        return int(self.pages.capacity[row]) + free - int(self._computed[row])

    def _first_chunk(self, request: Request, budget: PromptBudget) -> int:
        """Tokens of the next chunk of the first prompt, pages aside: a page at least, however little time there is."""
        longest = max(budget.longest(int(self._computed[request.row])), self.config.page_size)
        return self._with_whole_images(request, min(longest, budget.tokens, self._rest(request)), budget.tokens)

    def _rounded_chunk(self, request: Request, budget: PromptBudget) -> int:
        """The same of a prompt that is cut, of a length that suits graphs and kernels."""
        chunk = self._first_chunk(request, budget)
        if math.isinf(budget.ms):
            return chunk
        others, context = self.config.max_num_batched_tokens - budget.tokens, int(self._computed[request.row])
        bounds = min(chunk, self.config.page_size), min(budget.tokens, self._rest(request))
        return self._pace.cut(chunk, others, context, bounds, budget)

    def _serve_shorter(
        self, chunks: list[Chunk], admitted: list[Request], first: Request, budget: PromptBudget
    ) -> None:
        """Plan chunks of prompts that have less left than `first`, in up to half of the budget, the shortest first.

        A page of the shortest, however little time there is.
        """
        share, least = budget.half(), self.config.page_size
        for request in sorted(self._shorter_than(first), key=self._rest):
            if share.tokens < 1:
                return
            if self._was_cut(chunks, request):
                continue
            if request.status is RequestStatus.WAITING:
                if not self._try_admit_before(request):  # the others are longer
                    return
                admitted.append(request)
            context = int(self._computed[request.row])
            chunk = min(max(share.longest(context), least), share.tokens, self._rest(request))
            # Pages for all of a new one were there beside those for the rest of `first`.
            if request not in admitted:
                chunk = min(chunk, self._room(request) - self._pages_of_first(first, budget))
            if chunk < 1:
                return
            self._plan_chunk(chunks, request, chunk, budget, most=chunk)
            share.take(chunk, context)
            if share.ms <= 0:
                return
            least = 1

    def _pages_of_first(self, first: Request, budget: PromptBudget) -> int:
        """Tokens in the pages that the first prompt's next chunk needs and more."""
        return self._first_chunk(first, budget) + self.config.page_size

    def _shorter_than(self, first: Request) -> Iterator[Request]:
        """Prompts with less left than `first`, and of no lesser priority: those begun, and of the waiting some.

        None with images if `first` has some: it could wait for ever for the features that they are granted."""
        rest = self._rest(first)
        for request in (*self._prefilling, *itertools.islice(self._waiting, _LOOKED_AT)):
            is_ready = request.status is RequestStatus.RUNNING or request.row < 0
            is_ready = is_ready and (request.media is None or first.media is None)
            if is_ready and request.priority <= first.priority and self._rest(request) < rest:
                yield request

    def _try_admit_before(self, request: Request) -> bool:
        """Admit a waiting request although a begun prompt is not over; False: it would take what others need.

        Those are the pages of begun prompts and of the first in line, and a row for that one.
        """
        set_aside = sum(
            self.pages.pages_for(int(self._prefill_ids[other.row].size)) - int(self.pages.num_pages[other.row])
            for other in self._prefilling
        )
        rows = 1
        if request is not self._waiting[0]:
            rows, set_aside = 2, set_aside + self.pages.pages_for(self._rest(self._waiting[0]))
        return len(self._free_rows) >= rows and self._try_admit(request, set_aside)

    def _plan_chunk(
        self, chunks: list[Chunk], request: Request, length: int, budget: PromptBudget, *, most: int
    ) -> None:
        """Plan the next `length` tokens of a prompt, for which there are pages; up to `most` for an image's sake."""
        row = request.row
        start, target = int(self._computed[row]), self._prefill_ids[row].size
        if request.media is not None:
            length = self._with_whole_images(request, length, most)
            length = self._cut_for_images(request.media, start, length)
            if not length:
                return
        length = self._cut_for_state(row, start, target, length)
        needed = self.pages.pages_for(start + length) - int(self.pages.num_pages[row])
        self.pages.grow(row, needed, whole=self.pages.pages_for(target))
        self._computed[row] = start + length
        chunks.append(Chunk(request, start, self._prefill_ids[row][start : start + length], start + length == target))
        budget.take(length, start)
        self._save_state(request, start + length)
        if start + length == target:
            self._prefilling.remove(request)
            self._decoding = [*self._decoding, request]
            self._decode_rows = None

    def _was_cut(self, chunks: list[Chunk], request: Request) -> bool:
        """True if the step has a chunk of the request, which ended for the sake of a state or of an image."""
        may_be = self.config.num_snapshots > 0 or request.media is not None
        return may_be and any(chunk.request is request for chunk in chunks)

    def _with_whole_images(self, request: Request, length: int, most: int) -> int:
        """The length of a chunk that cuts no image whose tokens see what is ahead in it: it ends before such an image,
        or is all of it, or is 0 where that is more than `most`."""
        media, start = request.media, int(self._computed[request.row])
        if media is None or not media.sees_ahead:
            return length
        for image in media.images:
            if image.start < start + length < image.end:
                whole = image.end - start
                return image.start - start if image.start > start else whole if whole <= most else 0
        return length

    def _cut_for_images(self, media: RequestMedia, start: int, length: int) -> int:
        """The length of a chunk that ends before an image which is one too many for the step; its first image never is.

        An image of which earlier steps have computed tokens counts as well: its features have to be there.
        """
        most = self.config.max_features_per_step
        for image in media.images_within(start, start + length):
            features = image.end - image.start
            if features > self._features_left and self._features_left < most:
                return max(0, image.start - start)
            self._features_left = max(0, self._features_left - features)
        return length

    def _cut_for_state(self, row: int, start: int, target: int, length: int) -> int:
        """The length of a chunk that ends where a state is worth keeping: at a cut of its prompt, or else, if it is not
        the last one, with a page."""
        if not self.config.num_snapshots:
            return length
        end, page_size = start + length, self.config.page_size
        end = next((cut for cut in self._cuts[row] if start < cut < end), end)
        whole = end // page_size * page_size
        return (whole if start < whole and end < target else end) - start

    def _save_state(self, request: Request, num_tokens: int) -> None:
        """Plan to keep the request's state after `num_tokens`, the end of a chunk, if that is the end of a page.

        Never after a decode: a finished request may have run one too many.
        """
        if not self.config.num_snapshots or num_tokens % self.config.page_size:
            return
        state_row = self.pages.cache.states.reserve()
        if state_row is not None:
            self._saves.append(_Save(request, num_tokens, state_row))

    def _keep_states(self, batch: ScheduledBatch) -> None:
        """Keep the states that a step has copied, of requests that go on; others are not trusted."""
        for save in self._saves_in_flight.pop(batch.step_id, ()):
            request = save.request
            if request.status is RequestStatus.RUNNING:
                tokens = self._cache_keys[request.row][: save.num_tokens]
                self.pages.keep_state(tokens, self._salt(request), save.state_row)
            else:
                self.pages.cache.states.release(save.state_row)

    def _try_admit(self, request: Request, set_aside: int = 0) -> bool:
        """Move a waiting request into a row with its cached prefix; False: too few pages for all of its prompt.

        Room for one more page for each running request is left, or the newcomer would soon be preempted again, and
        for `set_aside` further pages.
        """
        row = self._free_rows[-1]
        token_ids = np.array(request.all_token_ids, dtype=np.int64)
        cache_keys = token_ids if request.media is None else np.asarray(request.cache_keys)
        rope = self.config.rope
        if rope is not None and rope.recomputes and request.rope_len <= rope.boundary < token_ids.size:
            request.rope_len = token_ids.size
        prefix = StatePrefix(0, 0, None)
        if self.config.enable_prefix_cache and not request.needs_prompt_logprobs:
            # Never all of it: the logits of the last token are what the request waits for.
            prefix = self._attach_prefix(row, cache_keys[:-1], self._salt(request))
        # Without set_aside: a prompt that is not over has used up the step's budget, or the pages, or has a page left.
        set_aside += len(self._prefilling) + len(self._decoding)
        if self.pages.pages_for(token_ids.size) - prefix.num_pages + set_aside > self.pages.available_pages:
            self.pages.release(row)
            return False

        self._waiting.pop(bisect_left(self._waiting, request.urgency, key=_URGENCY))
        self._free_rows.pop()
        self._owners[row] = request
        self._prefill_ids[row], self._cache_keys[row] = token_ids, cache_keys
        cached = prefix.num_pages * self.config.page_size
        self._computed[row] = cached
        self._last_computed[row] = len(request.prompt_token_ids) + request.max_new_tokens - 1
        self.pages.write_prefix(row)
        if self.config.num_snapshots:
            # At the last page that a prompt of the same beginning can reuse, and where more pages than states are.
            whole = (token_ids.size - 1) // self.config.page_size
            self._cuts[row] = tuple(sorted(pages * self.config.page_size for pages in {prefix.num_matched, whole}))
        if prefix.state_row is not None:
            self._restores.append((prefix.state_row, row))
        self._note_admission(request, cached)
        request.row = row
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = cached
        insort(self._prefilling, request, key=_URGENCY)
        return True

    def _attach_prefix(self, row: int, token_ids: np.ndarray, salt: Salt) -> StatePrefix:
        if self.config.num_snapshots:
            return self.pages.attach_state_prefix(row, token_ids, salt)
        num_pages = self.pages.attach_prefix(row, token_ids, salt)
        return StatePrefix(num_pages, num_pages, None)

    def _note_admission(self, request: Request, cached: int) -> None:
        if request.num_preemptions:
            self._recomputed_tokens -= cached
            return
        request.scheduled_time = time.monotonic()
        request.num_cached_tokens = cached
        if self.config.enable_prefix_cache and not request.needs_prompt_logprobs:
            self._prefix_queried_tokens += len(request.prompt_token_ids)
            self._prefix_hit_tokens += cached

    def _check_not_stuck(self) -> None:
        if self._requests and self._next_update == self._next_step:
            raise RuntimeError(
                f"internal error: {len(self._requests)} requests, but no step in flight and none can be planned; "
                f"{self.stats()}"
            )

    # --- a step is over -----------------------------------------------------------------------------------------------

    def step_took(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learns from a step whose tokens came, in the order of steps.

        Args:
            seconds: from the end of the step before, or from this one's launch where that came later.
        """
        self._pace.took(batch, seconds * 1e3)

    def update(self, batch: ScheduledBatch, token_ids: np.ndarray, broken_rows: Sequence[int] = ()) -> UpdateResult:
        """Take the sampled tokens of a batch, in the order of the batches.

        Args:
            token_ids: [R] integers; entries of rows that are not sampled are ignored.
            broken_rows: rows whose logits were no numbers; their requests end with 'abort'.

        Raises:
            RuntimeError: a batch out of order, or a wrong number of tokens.
        """
        self._step_over(batch)
        if token_ids.shape != (batch.num_requests,):
            raise RuntimeError(
                f"internal error: tokens of shape {token_ids.shape} for the {batch.num_requests} rows of a step"
            )
        broken = [request for row in broken_rows if self._end_broken(request := batch.requests[row])]
        accepted: list[int] = []
        ended: list[tuple[Request, int]] = []
        now = time.monotonic()
        columns = zip(
            batch.requests, token_ids.tolist(), batch.seq_lens.tolist(), batch.sample_mask.tolist(), strict=True
        )
        for row, (request, token, num_written, sampled) in enumerate(columns):
            if request.status is RequestStatus.FINISHED:
                continue
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens = num_written
            if not sampled:
                continue
            accepted.append(row)
            output = request.output_token_ids
            output.append(token)
            request.last_token_time = now
            if len(output) == 1:
                request.first_token_time = now
            if token in request.stop_ids or len(output) >= request.max_new_tokens:
                ended.append((request, token))
        finished = [request for request, token in ended if self._end_if_due(request, token)]
        for request in batch.requests[batch.num_decodes :]:
            if request.status is RequestStatus.RUNNING:
                self._publish(request)
        self._keep_states(batch)
        self._release_idle()
        return UpdateResult(accepted=accepted, finished=finished, broken=broken)

    def fail(self, batch: ScheduledBatch) -> list[Request]:
        """A step was lost: end its running requests with 'abort'; what it wrote is not trusted.

        One that has been preempted since computes what was lost again, unless a later step of its is in flight too: its
        token would stand in the lost one's place.

        To be called in the order of the batches, like update. Returns the requests that it ended.
        """
        self._step_over(batch)
        ended = [
            request
            for request in batch.requests
            if request.status is RequestStatus.RUNNING
            or (request.status is RequestStatus.WAITING and request.row >= 0 and self._in_flight[request.row])
        ]
        for request in ended:
            self._end(request, "abort", None)
        for save in self._saves_in_flight.pop(batch.step_id, ()):
            self.pages.cache.states.release(save.state_row)
        self._release_idle()
        return ended

    def _step_over(self, batch: ScheduledBatch) -> None:
        if batch.step_id != self._next_update:
            raise RuntimeError(
                f"internal error: step {batch.step_id} was updated, but step {self._next_update} is the next one due"
            )
        self._next_update += 1
        self._in_flight[batch.rows] -= 1

    def _end_if_due(self, request: Request, token: int) -> bool:
        """End the request if its newest token is due to; True if so. A stop token counts only from min_tokens on.

        Unless a grammar is complete with it: that allows end-of-sequence earlier where it allows nothing else.
        """
        count = len(request.output_token_ids)
        is_eos = token in request.eos_token_ids and not request.params.ignore_eos
        is_complete = request.grammar is not None and is_eos
        if token in request.stop_ids and (count >= request.params.min_tokens or is_complete):
            self._end(request, "stop", None if is_eos else token)
        elif count >= request.max_new_tokens:
            self._end(request, "length", None)
        else:
            return False
        return True

    def _end_broken(self, request: Request) -> bool:
        """End a request whose logits were no numbers; its KV, and what it had from the cache, is not trusted.

        Also what others published of the same prompt: it may be where they came from. False: it has ended already.
        """
        request.is_broken = True
        if self.config.enable_prefix_cache:
            self.pages.forget(request.cache_keys, self._salt(request))
            self._changes += 1
        return self.finish(request, "abort")

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.WAITING:
            self._waiting.pop(bisect_left(self._waiting, request.urgency, key=_URGENCY))
        else:
            self._leave_running(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._requests.remove(request)
        if request.row >= 0:
            self._release_or_leave(request.row)

    def _leave_running(self, request: Request) -> None:
        """Take a running request off the lists that schedule() works on; those in decode are filtered out there."""
        if self._prefilling and request in self._prefilling:
            self._prefilling.remove(request)
        else:
            self._decode_rows = None

    def _release_or_leave(self, row: int) -> None:
        if self._in_flight[row]:
            self._leaving.add(row)
        else:
            self._release(row)

    def _release_idle(self) -> None:
        """Release the rows whose last step is over."""
        if self._leaving:
            for row in [row for row in self._leaving if not self._in_flight[row]]:
                self._release(row)

    def _release(self, row: int) -> None:
        """Take a row back with whatever pages it still holds; its request is finished or preempted."""
        request = self._owners[row]
        if request is None:
            raise RuntimeError(f"internal error: row {row} was released twice")
        if request.status is RequestStatus.FINISHED:
            self._give_up_pages(request)
        request.row = -1
        self._owners[row] = None
        self._prefill_ids[row] = self._cache_keys[row] = NO_TOKENS
        self._leaving.discard(row)
        self._free_rows.append(row)
        self._changes += 1

    def _publish(self, request: Request) -> None:
        """Put the request's written full pages into the prefix cache while it goes on."""
        if self.config.enable_prefix_cache:
            tokens = self._cache_keys[request.row]
            self.pages.publish(request.row, tokens, self._num_shared(request), self._salt(request))
            self._changes += 1

    def _salt(self, request: Request) -> Salt:
        """Whatever else than tokens changes a request's keys and values: frequencies of RoPE too."""
        rope = self.config.rope
        return request.cache_salt if rope is None else (*request.cache_salt, rope.frequencies_of(request.rope_len))

    def _num_shared(self, request: Request) -> int:
        """The first of a request's written tokens whose keys and values are those of its salt."""
        rope, num_written = self.config.rope, request.num_computed_tokens
        return num_written if rope is None else rope.num_alike(request.rope_len, num_written)

    def _give_up_pages(self, request: Request) -> None:
        if request.is_broken:
            self.pages.discard(request.row)
        elif self.config.enable_prefix_cache:
            tokens, num_shared = request.cache_keys, self._num_shared(request)
            self.pages.publish_and_release(request.row, tokens, num_shared, self._salt(request))
        else:
            self.pages.release(request.row)
        self._changes += 1
