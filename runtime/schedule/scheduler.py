"""Decides which requests run in the next step, and what becomes of them when its tokens are known.

The policy: decodes first, then chunks of prompts under the budget (tokens, and beside decodes time: pace.py), then
admissions, most urgent first (priority, then arrival; prompts.py). When pages run out the least urgent running request
is preempted and later recomputed. The most urgent running request always moves, and the most urgent prompt always gets
half of a step, which is why nothing starves.

Overlap: schedule() for step n+1 may come before update() for step n. It assumes that every request goes on unless its
length ends it, which the host can count. (It cannot where drafts may be accepted: then schedule() waits for update(),
or plans by bounds: ahead.py.)
A request may be found finished while a later step of its own is in flight. It
keeps its row and pages until that step is updated, and its token of that step is dropped. A preempted one gives up its
pages at once, since steps run in order on one stream. It keeps its row until its last step is over, and keeps that
step's token.

Read first: request.py, scheduled_batch.py. Then rows.py (which request holds what), decodes.py and prompts.py (which
requests move), sampled_tokens.py (which end). Single-threaded; free of torch. R rows of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from mllm_compile.runtime.sampling.params import NONE_ALLOWED
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
from mllm_compile.runtime.schedule.pace import Pace, PromptBudget
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from mllm_compile.runtime.schedule.pages.sessions import SessionState
from mllm_compile.runtime.schedule.prompts import PromptPlan, PromptQueue
from mllm_compile.runtime.schedule.request import FINISH_REASONS, Request, RequestStatus, by_urgency
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.sampled_tokens import SampledTokens
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns, UpdateResult
from mllm_compile.runtime.schedule.stage_turns import StageTurns
from mllm_compile.runtime.schedule.state_copies import StateCopies
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.speculation.drafter import Speculation


class Scheduler:
    """Continuous batching with chunked prefill, prefix cache and preemption. See the module's header.

    Attributes:
        rows: which request holds which row.
        pages: the rows' page tables, and the prefix cache.
        decodes, prompts: the running requests, by what they do next; prompts has those that wait too.
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
        num_stages, num_rows = config.pipeline_parallel_size, self.rows.in_flight.size
        self._turns = StageTurns(num_stages, num_rows) if num_stages > 1 else None
        self._states = StateCopies(config, self.rows)
        self.prompts = PromptQueue(config, self.rows, self._states, self.decodes, self.pace)
        boundary = config.rope.boundary if config.rope is not None and config.rope.recomputes else None
        self._drafts = None if speculation is None else Drafts(speculation, self.rows, boundary)
        self._ahead: Ahead | None = None
        if self._drafts is not None and speculation is not None and self._drafts.are_on_device:
            self._ahead = Ahead(speculation, self.rows, config.max_num_batched_tokens, self._drafts.depths)
        self._tokens = SampledTokens(self.rows, self._end, self._end_broken, self._compute_anew)
        self._ahead_end = 0  # the step behind the last one that was planned by bounds
        self.tiers: Tiers | None = None
        self._tier_changes = 0
        self._had_none = False  # no step was in flight, and none could be planned
        self._requests: set[Request] = set()  # all that are not finished
        self._sequences = itertools.count() if sequences is None else sequences
        self._next_step = 0
        self._next_update = 0
        self._unfinished_update: ScheduledBatch | None = None  # the batch whose tokens were taken last
        self._preemptions = 0

    def use_tiers(self, tiers: Tiers) -> None:
        """Put memory behind the prefix cache, ahead of the first request."""
        self.tiers = self.prompts.tiers = self._states.tiers = tiers
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
        request.max_new_tokens = self.config.max_new_tokens(
            len(request.prompt_token_ids), request.params.max_tokens, self.config.pages_of_source(request.source)
        )
        if request.media is not None and request.media.sees_ahead:
            self.config.check_whole_images(request.media)
        if self.config.rope is not None:
            request.rope_len = len(request.prompt_token_ids)
        request.sequence = next(self._sequences)
        if request.session_tag is not None and self.config.enable_prefix_cache:
            request.session = self.pages.cache.sessions.begin(request.session_tag)
        self._requests.add(request)
        self.prompts.add(request)

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
        """Requests that are not finished, finished ones whose last step is still in flight, or pages to be stored."""
        self.finish_update()
        has_pages = self.tiers is not None and self.tiers.has_more
        return bool(self._requests or self.rows.leaving or has_pages)

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
        self._settle_tiers()
        self.rows.flush_prefix_cache()

    def retract(self) -> None:
        """Send all running requests back to the queue, to be computed anew; no step may be in flight."""
        self.finish_update()
        for request in [*self.prompts.begun, *self.decodes.current().requests]:
            self._preempt(request)

    def stats(self) -> SchedulerStats:
        self.finish_update()
        return SchedulerStats(
            running=len(self._requests) - len(self.prompts.waiting),
            waiting=len(self.prompts.waiting),
            pages_total=self.config.usable_pages,
            pages_used=self.pages.held_pages,
            pages_cached=self.pages.cache.num_pages,
            prefix_queried_tokens=self.prompts.queried_tokens,
            prefix_hit_tokens=self.prompts.hit_tokens,
            preemptions=self._preemptions,
            recomputed_tokens=self.prompts.recomputed_tokens,
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
        batch = self._plan_step()
        self._had_none = batch is None and self._next_update == self._next_step
        return batch

    def _plan_step(self) -> ScheduledBatch | None:
        if self._ahead is not None and self._drafts is not None:
            batch = self._schedule_ahead(self._ahead, self._drafts)
            if batch is not None or self._next_update < self._ahead_end:
                return batch
        if self.awaits_tokens(self._next_update < self._next_step):
            return None
        self._preempt_outgrown()
        decodes = self._plan_decodes()
        prefix_lens = self.rows.computed[decodes.rows] if decodes.requests else NO_DECODES.rows
        prompts = self._plan_prompts(decodes)
        if not decodes.requests and (prompts is None or not prompts.chunks):
            self._check_not_stuck()
            return None
        drafted = NOTHING_DRAFTED
        if decodes.requests:
            if self._drafts is not None:
                drafted = self._plan_drafts(self._drafts, decodes, prompts)
            self.rows.computed[decodes.rows] += 1 if drafted.num_new is None else drafted.num_new
        chunks, admitted = ([], []) if prompts is None else (prompts.chunks, prompts.admitted)
        return self._build(decodes, prefix_lens, chunks, admitted, drafted)

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

    def _schedule_ahead(self, ahead: Ahead, drafts: Drafts) -> ScheduledBatch | None:
        """The next step, if the device can draft for it and has the tokens of the one in flight, if there is one."""
        is_known = self._next_update == self._next_step
        if not is_known and self._ahead_end < self._next_step:
            return None
        if self.prompts.begun or (self.prompts.waiting and self.rows.num_free):
            return None
        drafts.prepare(self.decodes.requests, not is_known)
        plan = None if drafts.are_off else ahead.plan(self.decodes.current())
        if plan is None:
            return None
        prefix_lens = self.rows.computed[plan.decodes.rows]
        self.rows.computed[plan.decodes.rows] += plan.drafted.num_new
        self._ahead_end = self._next_step + 1
        return self._build(plan.decodes, prefix_lens, [], [], plan.drafted)

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
        if self._drafts is not None and self._drafts.depths is not None:
            self._drafts.depths.planned(batch, is_ahead=self._next_update < self._next_step)
        self._next_step += 1
        self.rows.begin_step(batch.rows)
        return batch

    def awaits_tokens(self, in_flight: bool) -> bool:
        """True if the next step may have drafts, which depend on a step that is in flight.

        Args:
            in_flight: a step is, of any rank.
        """
        drafts = self._drafts
        if drafts is None:
            return False
        drafts.prepare(self.decodes.requests, in_flight)
        return in_flight and not drafts.are_off and any(map(drafts.may_draft, self.decodes.requests))

    def _plan_drafts(self, drafts: Drafts, decodes: RunningDecodes, prompts: PromptPlan | None) -> Drafted:
        """Drafts in what the decodes' own tokens and the prompts leave of a step."""
        if self._next_update < self._next_step or drafts.are_off:  # none of these may have one
            return NOTHING_DRAFTED
        taken = len(decodes.requests) + (
            0 if prompts is None else sum(chunk.token_ids.size for chunk in prompts.chunks)
        )
        return drafts.plan(decodes, self.config.max_num_batched_tokens - taken)

    def _plan_prompts(self, decodes: RunningDecodes) -> PromptPlan | None:
        """The prompts of a step with these decodes; None while no prompt could be in it."""
        if self.prompts.begun or (self.prompts.waiting and self.rows.num_free):
            return self.prompts.plan(self._prompt_budget(decodes))
        return None

    def _preempt_outgrown(self) -> None:
        """Send back to the queue what the next step would take beyond the frequencies of its cached keys, where those
        are computed anew."""
        rope = self.config.rope
        if rope is None or not rope.recomputes:
            return
        decodes = self.decodes.current()
        for index in np.flatnonzero(self.rows.computed[decodes.rows] == rope.boundary).tolist():
            if decodes.requests[index].rope_len <= rope.boundary:
                self._preempt(decodes.requests[index])

    def _plan_decodes(self) -> RunningDecodes:
        """The decodes of this step, each with room for its token; preempts, or lets some sit out, when pages lack."""
        while True:
            decodes = self._decodes_of_step()
            if not decodes.requests and not self.prompts.begun:
                return decodes
            needy = self.rows.computed[decodes.rows] == self.pages.capacity[decodes.rows]
            num_needy = int(np.count_nonzero(needy))
            if num_needy == 0 and not self.prompts.begun:
                return decodes
            shortage = num_needy - self.pages.available_pages
            shortage_with_prefill = shortage + self._first_prompt_need(decodes)
            if shortage_with_prefill <= 0:
                break
            victim = self._preemption_victim()
            if shortage <= 0 and victim is self.prompts.begun[0]:
                break  # the prompt itself is the least urgent: it takes what pages the decodes leave
            if victim is None or shortage_with_prefill <= self.rows.pages_coming_back():
                decodes = self._sit_out(decodes, needy)
                needy = self.rows.computed[decodes.rows] == self.pages.capacity[decodes.rows]
                break
            self._preempt(victim)
        self.pages.grow_each(decodes.rows[needy])
        return decodes

    def _decodes_of_step(self) -> RunningDecodes:
        """All decodes; of stages those whose turn it is, unless steps wait for each other because of drafts."""
        decodes = self.decodes.current()
        if self._turns is None or not (self._drafts is None or self._drafts.are_off):
            return decodes
        return self._turns.of_step(decodes, self.rows.in_flight)

    def _prompt_budget(self, decodes: RunningDecodes) -> PromptBudget:
        """The part of a step that prompts may take beside these decodes."""
        num_decodes = len(decodes.requests)
        decode_keys = int(self.rows.computed[decodes.rows].sum()) + num_decodes if num_decodes else 0
        return self.pace.budget(num_decodes, decode_keys, self.config.max_num_batched_tokens - num_decodes)

    def _first_prompt_need(self, decodes: RunningDecodes) -> int:
        """Pages that the most urgent begun prompt lacks for its next chunk."""
        return self.prompts.pages_of_first(self._prompt_budget(decodes)) if self.prompts.begun else 0

    def _preemption_victim(self) -> Request | None:
        """The least urgent running request; None when there is but one."""
        running = self.prompts.begun + self.decodes.requests
        return max(running, key=by_urgency) if len(running) > 1 else None

    def _sit_out(self, decodes: RunningDecodes, needy: np.ndarray) -> RunningDecodes:
        """Leave out the least urgent of the decodes that need a page, as many as pages lack; theirs come soon."""
        without_page = sorted(
            (request for request, needs in zip(decodes.requests, needy.tolist(), strict=True) if needs), key=by_urgency
        )[self.pages.available_pages :]
        out = set(without_page)
        return RunningDecodes.of([request for request in decodes.requests if request not in out]) if out else decodes

    def _preempt(self, request: Request, is_clean: bool = True) -> None:
        """Send a running request back to the queue; its pages come back at once, except pages worth caching."""
        row = request.row
        self._preemptions += 1
        num_computed = int(self.rows.computed[row])
        request.num_preemptions += 1
        self._leave_running(request)
        if self._drafts is not None:
            self._drafts.leave(request)
        if is_clean:
            self.rows.give_up_pages(request)
        else:
            self.rows.discard_own_pages(request)
        request.begins_anew()
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self.prompts.put_back(request, num_computed)
        self.rows.give_back(row)

    def _check_not_stuck(self) -> None:
        if self.tiers is not None and self.tiers.is_busy:
            return
        if self._requests and self._next_update == self._next_step:
            raise RuntimeError(
                f"internal error: {len(self._requests)} requests, but no step in flight and none can be planned; "
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
        if self._drafts is not None and self._drafts.depths is not None:
            self._drafts.depths.took(batch, (seconds + host_seconds) * 1e3)

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
        if self._drafts is not None and self._drafts.depths is not None:
            self._drafts.depths.checked(batch, runs)
        if runs is None:
            result = self._tokens.take(batch, token_ids, broken_rows)
        else:
            result = self._tokens.take_runs(batch, token_ids, runs, set(broken_rows))
        self._unfinished_update = batch
        return result

    def _compute_anew(self, request: Request) -> None:
        """Send a request back to the queue whose last page may hold NaN, of a draft; it is drafted no more."""
        request.had_broken_draft = True
        self._preempt(request, is_clean=False)

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
        it.

        To be called in the order of the batches, like update. Returns the requests that it ended.
        """
        self._step_over(batch)
        self.rows.end_step(batch.rows)
        self._settle_tiers()
        self.rows.sources.forget(batch.encoded)
        ended = [
            request
            for request in batch.requests
            if request.status is RequestStatus.RUNNING
            or (request.status is RequestStatus.WAITING and request.row >= 0 and self.rows.in_flight[request.row])
        ]
        for request in ended:
            self._end(request, "abort", None)
        for request in batch.admitted:
            if request.status is RequestStatus.RUNNING:
                self._preempt(request)
        self._states.drop(batch.step_id)
        self.rows.release_idle()
        if self.tiers is not None and batch.cleared_pages.size:
            self.rows.flush_prefix_cache()  # a load may have filled some of these since
        self.pages.clear_again(batch.cleared_pages)
        return ended

    def _step_over(self, batch: ScheduledBatch) -> None:
        if batch.step_id != self._next_update:
            raise RuntimeError(
                f"internal error: step {batch.step_id} was updated, but step {self._next_update} is the next one due"
            )
        self._next_update += 1
        self.finish_update()  # the one before

    def _end_broken(self, request: Request, token: int) -> bool:
        """End a request without a next token. False: it has ended already.

        Where its logits were no numbers its KV, and what it had from the cache, is not trusted; also what others
        published of the same prompt: it may be where they came from. A request that forbids all tokens costs others
        nothing.
        """
        if token == NONE_ALLOWED:
            request.forbids_all = True
        else:
            request.is_broken = True
            self._settle_tiers()
            self.rows.forget_prefix(request)
        return self.finish(request, "abort")

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        if self.tiers is not None:
            self.tiers.leave(request)
        if request.status is RequestStatus.WAITING:
            self.prompts.remove_waiting(request)
        else:
            self._leave_running(request)
            if self._drafts is not None:
                self._drafts.leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._requests.remove(request)
        asked = request.params.kv_transfer_params
        if asked is not None and asked.do_remote_decode and reason != "abort" and self.tiers is not None:
            self._promise(self.tiers, request)
        if request.session is not None:
            num_tokens = len(request.prompt_token_ids)
            self.pages.cache.sessions.over(request.session, num_tokens, request.num_cached_tokens)
        if self._drafts is not None:
            self._drafts.end(request)
        if request.row >= 0:
            self.rows.give_back(request.row)

    def _promise(self, tiers: Tiers, request: Request) -> None:
        """Has another engine find a request's prompt, but its last token: the logits behind it are to be computed."""
        if tiers.handover is not None:
            keys = request.cache_keys[: len(request.prompt_token_ids) - 1]
            tiers.handover.promise(request, keys, self.rows.salt(request))

    def _leave_running(self, request: Request) -> None:
        """Take a running request off what schedule() works on."""
        if not self.prompts.remove_begun(request):
            self.decodes.note_end()
