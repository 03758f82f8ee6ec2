"""Decides which requests run in the next step, and what becomes of them when its tokens are known.

The policy, and who has which part of it. Decodes come first; when pages run out the least urgent running request is
preempted, and later recomputed (preemption.py). Then come chunks of prompts under the budget (prompts.py): of tokens,
and beside decodes of time (pace.py). Then waiting requests are admitted (admission.py). Urgent is by priority, then by
arrival. The most urgent running request always moves, and the most urgent prompt always gets half of a step, which is
why nothing starves.

Overlap: schedule() for step n+1 may come before update() for step n. It assumes that every request goes on unless its
length ends it, which the host can count. (It cannot where drafts may be accepted: then schedule() waits for update(),
or plans by bounds: ahead.py.) A request may be found finished while a later step of its own is in flight. It keeps its
row and pages until that step is updated, and its token of that step is dropped. A preempted one gives up its pages at
once, since steps run in order on one stream. It keeps its row until its last step is over, and keeps that step's token.

This file has the order of steps. Read first: request.py, scheduled_batch.py. Then rows.py (which request holds what),
preemption.py and prompts.py (which requests move), sampled_tokens.py (which get tokens), lifecycle.py (how they end).
Single-threaded; free of torch. R rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from mllm_compile.runtime.schedule.admission import Admission
from mllm_compile.runtime.schedule.ahead import Ahead
from mllm_compile.runtime.schedule.batch_builder import (
    NO_DECODES,
    NOTHING_DRAFTED,
    Chunk,
    Drafted,
    RunningDecodes,
    build_batch,
)
from mllm_compile.runtime.schedule.config import SchedulerConfig, SchedulerStats
from mllm_compile.runtime.schedule.decodes import Decodes
from mllm_compile.runtime.schedule.drafts import Drafts
from mllm_compile.runtime.schedule.lifecycle import Lifecycle
from mllm_compile.runtime.schedule.pace import Pace
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from mllm_compile.runtime.schedule.pages.sessions import SessionState
from mllm_compile.runtime.schedule.preemption import Preemption
from mllm_compile.runtime.schedule.prompts import Prompts
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.sampled_tokens import SampledTokens
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns, UpdateResult
from mllm_compile.runtime.schedule.state_copies import StateCopies
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.speculation.drafter import Speculation


class Scheduler:
    """Continuous batching with chunked prefill, prefix cache and preemption. See the module's header.

    Attributes:
        rows: which request holds which row.
        pages: the rows' page tables, and the prefix cache.
        admission: the requests that wait.
        decodes, prompts: the running requests, by what they do next.
        drafts: what is drafted for decodes; None: nothing.
        pace: the bound of steps by time, and what steps were seen to take.
        tiers: the memory behind the prefix cache; None: no config asks for one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        first_row: int = 1,
        sequences: Iterator[int] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """
        Args:
            first_row: of its requests, which have as many rows as config.max_running_requests says.
            sequences: their numbers, where others draw of them too.
            speculation: how decodes get drafts; None: they get none.
        """
        self.config = config
        self.rows = Rows(config, first_row, 0 if speculation is None else speculation.drafter.keys_reach)
        self.pages = self.rows.pages
        self.pace = Pace(config.max_step_ms, config.step_sizes, config.query_blocks, config.divide_prefix)
        self.decodes = Decodes(self.rows)
        self._states = StateCopies(config, self.rows)
        self.admission = Admission(config, self.rows, self._states)
        self.prompts = Prompts(config, self.rows, self._states, self.admission, self.decodes, self.pace)
        self.drafts = None if speculation is None else Drafts(speculation, self.rows, config)
        self._lifecycle = Lifecycle(
            config, self.rows, self.admission, self.prompts, self.decodes, self.drafts, sequences
        )
        self._preemption = Preemption(config, self.rows, self.prompts, self.decodes, self._lifecycle.preempt)
        self._tokens = SampledTokens(self.rows, self._lifecycle)
        self.tiers: Tiers | None = None
        self._tier_changes = 0
        self._had_none = False  # no step was in flight, and none could be planned
        self._computes_prompts = False  # the last step that was planned does
        self._next_step = 0
        self._next_update = 0
        self._ahead_end = 0  # the step behind the last one that was planned by bounds
        self._unfinished_update: ScheduledBatch | None = None  # the batch whose tokens were taken last

    def use_tiers(self, tiers: Tiers) -> None:
        """Put memory behind the prefix cache, ahead of the first request."""
        self.tiers = self.admission.tiers = self._states.tiers = self._lifecycle.tiers = tiers
        tiers.read_behind(self._states.rows_to_read)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Has `wake` called when a copy of a tier is over, from any thread: then schedule() may have more to do."""
        if self.tiers is not None:
            self.tiers.wake_by(wake)

    def weights_changed(self) -> None:
        """Note that keys and values are of other weights from here on, with no step in flight."""
        if self.tiers is not None:
            self.tiers.settle()
            self.tiers.leave_below()

    def close(self) -> None:
        """End copies for good; nobody schedules any more."""
        if self.tiers is not None:
            self.tiers.close()

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request; sets its sequence and max_new_tokens (max_tokens clipped to max_model_len).

        Raises:
            RequestError: the prompt is empty, or it could never fit.
        """
        self._lifecycle.add(request)

    def abort(self, request: Request) -> bool:
        """End a request with finish_reason 'abort'. False: it has ended already."""
        return self.finish(request, "abort")

    def finish(self, request: Request, reason: str = "stop", stop_reason: int | str | None = None) -> bool:
        """End a request from outside, as for a stop string in its text. False: it has ended already.

        A token of its that is in flight is dropped; row and pages come back once that step is updated.
        """
        return self._lifecycle.finish(request, reason, stop_reason)

    def end_at(self, request: Request, num_output: int, stop_string: str) -> None:
        """End a request at a stop string in the text of its first `num_output` output tokens; later ones, of the same
        verify step, are dropped. It may have ended with one of these."""
        request.num_accepted_tokens -= len(request.output_token_ids) - num_output
        del request.output_token_ids[num_output:], request.output_logprobs[num_output:]
        num_tokens = len(request.prompt_token_ids) + num_output
        request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
        if not self.finish(request, "stop", stop_string):
            request.finish_reason, request.stop_reason = "stop", stop_string

    def has_work(self) -> bool:
        """Requests that are not finished, finished ones whose last step is still in flight, or pages to be stored that
        another engine waits for."""
        self.finish_update()
        is_awaited = self.tiers is not None and self.tiers.is_awaited
        return bool(self._lifecycle.unfinished or self.rows.leaving or is_awaited)

    @property
    def has_idle_work(self) -> bool:
        """Pages to be stored: schedule() begins that where nothing else is to be done, and no request waits for it."""
        return self.tiers is not None and self.tiers.has_more

    def session_state(self, key: Hashable) -> SessionState | None:
        """The state of a session; None: it is unknown."""
        return self.pages.cache.sessions.state(key)

    def end_session(self, key: Hashable) -> bool:
        """End a session; its pages are given up first. False: it is unknown."""
        return self.pages.cache.sessions.end(key)

    @property
    def all_tiers(self) -> list[Tiers]:
        """The memory behind the prefix cache, if there is any."""
        return [] if self.tiers is None else [self.tiers]

    @property
    def caches(self) -> list[RadixCache]:
        """The prefix cache of each rank."""
        return [self.pages.cache]

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes, of tiers too; running requests go on with the pages they hold."""
        self.finish_update()
        self._settle_tiers()
        self.rows.flush_prefix_cache()
        if self.tiers is not None:
            self.tiers.clear()

    def drop_kv(self) -> None:
        """Let go of all pages, whose memory goes, with no step in flight: requests begin anew. Tiers keep theirs."""
        self.retract()
        if self.tiers is not None:
            self.tiers.settle()
            self.tiers.store_rest()
        self.rows.flush_prefix_cache()

    def retract(self) -> None:
        """Send all running requests back to the queue, to be computed anew; no step may be in flight."""
        self.finish_update()
        self._lifecycle.preempt_all()

    def stats(self) -> SchedulerStats:
        self.finish_update()
        return SchedulerStats(
            running=len(self._lifecycle.unfinished) - len(self.admission.waiting),
            waiting=len(self.admission.waiting),
            pages_total=self.config.usable_pages,
            pages_used=self.pages.held_pages,
            pages_cached=self.pages.cache.num_pages,
            prefix_queried_tokens=self.admission.queried_tokens,
            prefix_hit_tokens=self.admission.hit_tokens,
            preemptions=self._lifecycle.num_preemptions,
            recomputed_tokens=self.admission.recomputed_tokens,
            snapshots_kept=self.pages.cache.states.num_kept,
            snapshots_total=self.config.num_snapshots,
            sessions=len(self.pages.cache.sessions),
            sessions_ended=self.pages.cache.sessions.num_ended,
            ended_pages_evicted=self.pages.cache.sessions.pages_given_up,
            step_bound_ms=self.pace.last_bound_ms,
            tiers=() if self.tiers is None else self.tiers.figures(),
        )

    # --- a step is planned --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step; None when nothing can run now (no work, or an update must come first).

        Run the batch before the next one, on one stream, then hand it to update() or fail().
        """
        self.finish_update()
        if self.tiers is None:
            return self._plan_step()
        self._advance_tiers(self.tiers)
        is_busy = self._in_flight
        is_better_later = self._computes_prompts and self.tiers.may_wait
        if self._may_evict or (is_busy and not is_better_later):
            self.tiers.begin_stores()
        elif is_busy:
            self.tiers.begin_writes()
        batch = self._plan_step()
        self._had_none = batch is None and not is_busy
        if self._had_none:
            self.tiers.begin_stores()
        return batch

    @property
    def _may_evict(self) -> bool:
        """The next step may take pages of the prefix cache, which are stored first: for its tokens, and at once for all
        of a long prompt (PageTables.grow) and of a load."""
        most = self.config.max_num_batched_tokens // self.config.page_size + len(self._lifecycle.unfinished)
        return self.pages.allocator.available_pages < most + 2 * self.pages.pages_for(self.prompts.longest)

    @property
    def _in_flight(self) -> bool:
        """Some step was planned whose tokens are not known."""
        return self._next_update < self._next_step

    def _plan_step(self) -> ScheduledBatch | None:
        drafts = self.drafts
        if drafts is not None and drafts.ahead is not None:
            batch = self._plan_ahead(drafts, drafts.ahead)
            if batch is not None or self._next_update < self._ahead_end:
                return batch
        if self.awaits_tokens(self._in_flight):
            return None
        decodes = self._preemption.choose(has_drafts=drafts is not None and not drafts.are_off)
        prefix_lens = self.rows.computed[decodes.rows] if decodes.requests else NO_DECODES.rows
        prompts = self.prompts.plan(decodes)
        chunks, admitted = ([], []) if prompts is None else (prompts.chunks, prompts.admitted)
        if not decodes.requests and not chunks:
            self._check_not_stuck()
            return None
        drafted = NOTHING_DRAFTED
        if decodes.requests:
            if drafts is not None and not drafts.are_off and not self._in_flight:
                taken = len(decodes.requests) + sum(chunk.token_ids.size for chunk in chunks)
                drafted = drafts.plan(decodes, self.config.max_num_batched_tokens - taken)
            self.rows.computed[decodes.rows] += 1 if drafted.num_new is None else drafted.num_new
        return self._build(decodes, prefix_lens, chunks, admitted, drafted)

    def _plan_ahead(self, drafts: Drafts, ahead: Ahead) -> ScheduledBatch | None:
        """The next step, if the device can draft for it and has the tokens of the one in flight, if there is one."""
        if self._in_flight and self._ahead_end < self._next_step:
            return None
        if self.prompts.may_have_chunks:
            return None
        drafts.choose_depths(self.decodes.requests, self._in_flight)
        plan = None if drafts.are_off else ahead.plan(self.decodes.current())
        if plan is None:
            return None
        prefix_lens = self.rows.computed[plan.decodes.rows]
        self.rows.computed[plan.decodes.rows] += plan.drafted.num_new
        self._ahead_end = self._next_step + 1
        return self._build(plan.decodes, prefix_lens, [], [], plan.drafted)

    def _advance_tiers(self, tiers: Tiers) -> None:
        tiers.advance()
        if tiers.changes != self._tier_changes:
            self._tier_changes = tiers.changes
            self.rows.changes += 1

    def _settle_tiers(self) -> None:
        """Wait until no page moves."""
        if self.tiers is not None:
            self.tiers.settle()

    @property
    def awaits_copies(self) -> bool:
        """True if no step is in flight, and the next one waits for the end of a copy."""
        return self._had_none and self.tiers is not None and self.tiers.is_busy

    def _build(
        self,
        decodes: RunningDecodes,
        prefix_lens: np.ndarray,
        chunks: list[Chunk],
        admitted: list[Request],
        drafted: Drafted,
    ) -> ScheduledBatch:
        """The batch of a step that is planned."""
        changes = self.pages.take_writes(), self.pages.take_cleared(), admitted, *self._states.take(self._next_step)
        encoded = self.rows.sources.take_encoded()
        batch = build_batch(self._next_step, decodes, prefix_lens, chunks, *changes, drafted=drafted, encoded=encoded)
        self._computes_prompts = bool(chunks)
        if self.drafts is not None:
            self.drafts.planned(batch, is_ahead=self._in_flight)
        self._next_step += 1
        self.rows.begin_step(batch.rows)
        return batch

    def awaits_tokens(self, in_flight: bool) -> bool:
        """True if the next step may have drafts, which depend on a step that is in flight.

        Args:
            in_flight: a step is, of any rank.
        """
        return self.drafts is not None and self.drafts.awaits_tokens(self.decodes.requests, in_flight)

    def _check_not_stuck(self) -> None:
        if self.tiers is not None and self.tiers.is_busy:
            return
        unfinished = self._lifecycle.unfinished
        if unfinished and not self._in_flight:
            raise RuntimeError(
                f"internal error: {len(unfinished)} requests, but no step in flight and none can be planned; "
                f"{self.stats()}"
            )

    # --- a step is over -----------------------------------------------------------------------------------------------

    def step_took(self, batch: ScheduledBatch, seconds: float, host_seconds: float = 0.0) -> None:
        """Learns from a step whose tokens came, in the order of steps; before `update`.

        Args:
            seconds: from the end of the step before, or from this one's launch where that came later.
            host_seconds: from the end of the step before to such a later launch, unless there was nothing to do.
        """
        self.pace.took(batch, seconds * 1e3)
        if self.tiers is not None:
            self.tiers.took(batch, seconds * 1e3)
        if self.drafts is not None:
            self.drafts.took(batch, (seconds + host_seconds) * 1e3)

    def update(
        self,
        batch: ScheduledBatch,
        token_ids: np.ndarray,
        broken_rows: Sequence[int] = (),
        runs: TokenRuns | None = None,
    ) -> UpdateResult:
        """Take the sampled tokens of a batch, in the order of the batches; `finish_update` does the rest of what
        follows.

        Args:
            token_ids: [R] integers, the newest of each row; entries of rows that are not sampled are ignored.
            broken_rows: rows without a next token; their requests end with 'abort'.
            runs: all tokens, of a verify step.

        Raises:
            RuntimeError: a batch out of order, or a wrong number of tokens.
        """
        self._step_over(batch)
        if token_ids.shape != (batch.num_requests,):
            raise RuntimeError(
                f"internal error: tokens of shape {token_ids.shape} for the {batch.num_requests} rows of a step"
            )
        if self.drafts is not None:
            self.drafts.checked(batch, runs)
        if runs is None:
            result = self._tokens.take(batch, token_ids, broken_rows)
        else:
            result = self._tokens.take_runs(batch, token_ids, runs, set(broken_rows))
        self._unfinished_update = batch
        return result

    def finish_update(self) -> None:
        """Finish the last update.

        It publishes the prompts' pages and states to the prefix cache, and frees rows whose last step it was. It runs
        after tokens are delivered; methods that depend on it call it first.
        """
        batch, self._unfinished_update = self._unfinished_update, None
        if batch is None:
            return
        self.rows.end_step(batch.rows)
        for request in batch.requests[batch.num_decodes :]:
            if request.status is RequestStatus.RUNNING:
                self.rows.publish(request)
        self._states.keep(batch.step_id)
        self.rows.release_idle()

    def fail(self, batch: ScheduledBatch) -> list[Request]:
        """A step was lost: end its running requests with 'abort', since what it wrote is not trusted.

        A request that was preempted since then computes the lost tokens again. If a later step of it is in flight, it
        ends: that step's token would take the lost one's place. A request that was admitted with the step but has no
        token in it goes back to the queue: its pages, state and parameters may not have reached its row. (Its
        images were too many for the step.) So no request holds a page that the step was to clear; the next one clears
        it. What attends to a source that the encoder was to read in it begins anew, or ends with its later step.

        To be called in the order of the batches, like update. Returns the requests that it ended.
        """
        self._step_over(batch)
        self.rows.end_step(batch.rows)
        self._settle_tiers()
        ended = [
            request
            for request in batch.requests
            if request.status is RequestStatus.RUNNING or self._is_in_a_step(request)
        ]
        begun = list(batch.admitted)
        if batch.encoded:
            self.rows.flush_prefix_cache()  # of sources too, by whatever salt
            lost = {request.source.digest for request in batch.encoded if request.source is not None}
            begun += [
                request
                for request in self._lifecycle.unfinished
                if request.source is not None and request.source.digest in lost
            ]
        ended += [request for request in dict.fromkeys(begun) if request not in ended and self._is_in_a_step(request)]
        for request in ended:
            self._lifecycle.end(request, "abort", None)
        for request in begun:
            if request.status is RequestStatus.RUNNING:
                self._lifecycle.preempt(request)
        self._states.drop(batch.step_id)
        self.rows.release_idle()
        if self.tiers is not None and batch.cleared_pages.size:
            self.rows.flush_prefix_cache()  # a load may have filled some of these since
        self.pages.clear_again(batch.cleared_pages)
        return ended

    def _is_in_a_step(self, request: Request) -> bool:
        """True if a step of an unfinished request is in flight: of one that was preempted too."""
        return not request.is_finished and request.row >= 0 and bool(self.rows.in_flight[request.row])

    def _step_over(self, batch: ScheduledBatch) -> None:
        if batch.step_id != self._next_update:
            raise RuntimeError(
                f"internal error: step {batch.step_id} was updated, but step {self._next_update} is the next one due"
            )
        self._next_update += 1
        self.finish_update()  # the one before
