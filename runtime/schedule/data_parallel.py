"""A scheduler for ranks that have requests of their own: each request is one rank's, from its arrival to its end.

One Scheduler a rank decides for that rank alone, over its pages and its rows; their steps are one step of all. Rank r
has the rows from r * R + 1 on, R a rank's most requests, so a row says whose it is. Page ids are a rank's own; those
that are to be cleared carry the rank, as nothing else says it (`pages_of_rank`). Rows of states are told by the
request's (`copies_of_rank`). Single-threaded; free of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mllm_compile.runtime.schedule.config import SchedulerConfig, SchedulerStats
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from mllm_compile.runtime.schedule.pages.sessions import SessionState
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import NO_DRAFTS, ScheduledBatch, TokenRuns, UpdateResult
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.speculation.drafter import Speculation


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's share of a step: its batch, and where its rows are in the step's."""

    rank: int
    batch: ScheduledBatch
    places: np.ndarray


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The constant part of steps of decodes alone, made of each rank's list of requests."""

    lists: tuple[list[Request], ...]
    batch: ScheduledBatch
    places: tuple[np.ndarray, ...]


class DataParallelScheduler:
    """Gives each request to the scheduler of one rank; used as a Scheduler is."""

    def __init__(self, config: SchedulerConfig, num_ranks: int, speculation: Speculation | None = None) -> None:
        """
        Args:
            config: of each rank.
            speculation: as Scheduler takes it.
        """
        sequences, most = itertools.count(), config.max_running_requests
        self.config = replace(
            config,
            max_running_requests=most * num_ranks,
            max_num_batched_tokens=config.max_num_batched_tokens * num_ranks,
        )
        self._schedulers = [Scheduler(config, rank * most + 1, sequences, speculation) for rank in range(num_ranks)]
        self._num_pages = config.num_pages
        self._rank_of: dict[Request, int] = {}
        self._load = [0] * num_ranks  # tokens that requests of a rank may come to have
        self._in_flight: dict[int, tuple[_Part, ...]] = {}
        self._next_step = 0
        self._decodes: _Decodes | None = None

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request at the rank with least to do; as Scheduler.add."""
        rank = self._load.index(min(self._load))
        self._schedulers[rank].add(request)
        self._rank_of[request] = rank
        self._load[rank] += _most_tokens(request)

    def abort(self, request: Request) -> bool:
        """End a request with finish_reason 'abort'. False: it has ended already."""
        return self.finish(request, "abort")

    def finish(self, request: Request, reason: str = "stop", stop_reason: int | str | None = None) -> bool:
        """End a request from outside; as Scheduler.finish."""
        rank = self._rank_of.get(request)
        if rank is None or not self._schedulers[rank].finish(request, reason, stop_reason):
            return False
        self._forget([request])
        return True

    def _forget(self, ended: Sequence[Request]) -> None:
        for request in ended:
            rank = self._rank_of.pop(request, None)
            if rank is not None:
                self._load[rank] -= _most_tokens(request)

    def has_work(self) -> bool:
        """Requests that are not finished, or finished ones whose last step is still in flight."""
        return any(scheduler.has_work() for scheduler in self._schedulers)

    @property
    def has_idle_work(self) -> bool:
        """False: no rank has a tier."""
        return False

    def session_state(self, key: Hashable) -> SessionState | None:
        """The state of a session over all ranks, which may each have some of its requests; None: it is unknown."""
        found = [state for one in self._schedulers if (state := one.session_state(key)) is not None]
        if not found:
            return None
        return SessionState(
            running=sum(one.running for one in found),
            turns=sum(one.turns for one in found),
            prompt_tokens=sum(one.prompt_tokens for one in found),
            cached_tokens=sum(one.cached_tokens for one in found),
            kept_tokens=sum(one.kept_tokens for one in found),
            idle_s=min(one.idle_s for one in found),
        )

    def end_session(self, key: Hashable) -> bool:
        """End a session on all ranks. False: it is unknown."""
        ended = [one.end_session(key) for one in self._schedulers]
        return any(ended)

    @property
    def all_tiers(self) -> list[Tiers]:
        """The memory behind the prefix caches."""
        return [tiers for one in self._schedulers for tiers in one.all_tiers]

    @property
    def caches(self) -> list[RadixCache]:
        """The prefix cache of each rank."""
        return [scheduler.pages.cache for scheduler in self._schedulers]

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests go on with the pages they hold."""
        for scheduler in self._schedulers:
            scheduler.flush_prefix_cache()

    def drop_kv(self) -> None:
        """Let go of all pages; as Scheduler.drop_kv."""
        for scheduler in self._schedulers:
            scheduler.drop_kv()

    @property
    def awaits_copies(self) -> bool:
        """False: tiers of memory are of one rank."""
        return False

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Do nothing: no rank has a tier."""

    def weights_changed(self) -> None:
        """Do nothing, likewise."""

    def close(self) -> None:
        """Do nothing, likewise."""

    def retract(self) -> None:
        """Send all running requests back to the queue; as Scheduler.retract."""
        for scheduler in self._schedulers:
            scheduler.retract()

    def stats(self) -> SchedulerStats:
        """The figures of all ranks together."""
        every = [scheduler.stats() for scheduler in self._schedulers]
        names = [name for name in SchedulerStats.__dataclass_fields__ if name not in ("step_bound_ms", "tiers")]
        bounds = [one.step_bound_ms for one in every if one.step_bound_ms is not None]
        sums = {name: sum(getattr(one, name) for one in every) for name in names}
        return SchedulerStats(**sums, step_bound_ms=max(bounds, default=None))

    # --- steps --------------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step of all ranks; as Scheduler.schedule. A rank may have no part in it."""
        in_flight = bool(self._in_flight)
        if any(scheduler.awaits_tokens(in_flight) for scheduler in self._schedulers):
            return None
        batches = [(rank, scheduler.schedule()) for rank, scheduler in enumerate(self._schedulers)]
        found = [(rank, batch) for rank, batch in batches if batch is not None]
        if not found:
            return None
        joined, places = self._joined(found)
        self._in_flight[joined.step_id] = tuple(
            _Part(rank, batch, place) for (rank, batch), place in zip(found, places, strict=True)
        )
        self._next_step += 1
        return joined

    def step_took(self, batch: ScheduledBatch, seconds: float, host_seconds: float = 0.0) -> None:
        """Note how long a step took, on every rank."""
        for part in self._in_flight[batch.step_id]:
            self._schedulers[part.rank].step_took(part.batch, seconds, host_seconds)

    def update(
        self,
        batch: ScheduledBatch,
        token_ids: np.ndarray,
        broken_rows: Sequence[int] = (),
        runs: TokenRuns | None = None,
    ) -> UpdateResult:
        """Take a step's tokens in; as Scheduler.update."""
        accepted: dict[int, int] = {}  # row → its tokens
        finished: list[Request] = []
        broken: list[Request] = []
        for part in self._in_flight.pop(batch.step_id):
            own = np.flatnonzero(np.isin(part.places, broken_rows)).tolist() if len(broken_rows) else ()
            own_runs = None if runs is None else runs.of(part.places)
            result = self._schedulers[part.rank].update(part.batch, token_ids[part.places], own, own_runs)
            counts = [1] * len(result.accepted) if result.counts is None else result.counts
            accepted |= zip(part.places[result.accepted].tolist(), counts, strict=True)
            finished += result.finished
            broken += result.broken
        self._forget(finished)
        self._forget(broken)
        rows = sorted(accepted)
        result = UpdateResult(accepted=rows, finished=finished, broken=broken)
        if runs is not None:
            result = replace(result, counts=[accepted[row] for row in rows], num_drafted=runs.num_drafted)
        return result

    def end_at(self, request: Request, num_output: int, stop_string: str) -> None:
        """End a request at a stop string; as Scheduler.end_at."""
        self._schedulers[self._rank_of.get(request, 0)].end_at(request, num_output, stop_string)
        self._forget([request])

    def finish_update(self) -> None:
        """Do the rest of what follows from the last step's tokens, on every rank; as Scheduler.finish_update."""
        for scheduler in self._schedulers:
            scheduler.finish_update()

    def fail(self, batch: ScheduledBatch) -> list[Request]:
        """Give a step up that did not happen; as Scheduler.fail."""
        parts = self._in_flight.pop(batch.step_id)
        lost = [request for part in parts for request in self._schedulers[part.rank].fail(part.batch)]
        self._forget([request for request in lost if request.is_finished])
        return lost

    def _joined(self, found: list[tuple[int, ScheduledBatch]]) -> tuple[ScheduledBatch, Sequence[np.ndarray]]:
        """One batch of all, decodes first, and where the rows of each are in it."""
        batches = [batch for _, batch in found]
        cleared = [batch.cleared_pages + rank * self._num_pages for rank, batch in found if batch.cleared_pages.size]
        changes: dict[str, Any] = {
            "step_id": self._next_step,
            "cleared_pages": np.concatenate(cleared) if cleared else batches[0].cleared_pages,
            "admitted": [request for batch in batches for request in batch.admitted],
        }
        for name in ("page_rows", "page_positions", "page_ids", "state_restores", "state_saves"):
            changes[name] = np.concatenate([getattr(batch, name) for batch in batches])
        lists, has_drafts = tuple(batch.requests for batch in batches), any(batch.has_drafts for batch in batches)
        known = None if has_drafts else self._decodes
        if known is not None and len(known.lists) == len(lists) and all(map(_is, known.lists, lists)):
            prefix_lens = np.concatenate([batch.prefix_lens for batch in batches])
            return replace(known.batch, prefix_lens=prefix_lens, **changes), known.places
        taken, places = _decodes_first(batches)
        every = [request for batch in batches for request in batch.requests]
        by_row: dict[str, Any] = {name: _in_order(batches, name, taken) for name in _BY_ROW}
        joined = replace(
            batches[0],
            requests=[every[index] for index in taken.tolist()],
            num_decodes=sum(batch.num_decodes for batch in batches),
            num_tokens=sum(batch.num_tokens for batch in batches),
            prefill_token_ids=np.concatenate([batch.prefill_token_ids for batch in batches]),
            verify_token_ids=np.concatenate([_ids_of_decodes(batch) for batch in batches]) if has_drafts else NO_DRAFTS,
            **by_row,
            **changes,
        )
        is_constant = joined.num_decodes == joined.num_requests and not has_drafts
        self._decodes = _Decodes(lists, joined, places) if is_constant else None
        return joined, places


# Arrays of a ScheduledBatch with a value for each of its requests.
_BY_ROW = ("rows", "num_new", "prefix_lens", "sample_mask", "rope_lens", "adapter_slots", "prompt_logprob_rows")


def _ids_of_decodes(batch: ScheduledBatch) -> np.ndarray:
    """The input ids of a batch's decodes, drafts among them; all are known where any rank drafts."""
    if batch.has_drafts:
        return batch.verify_token_ids
    return np.array([request.output_token_ids[-1] for request in batch.requests[: batch.num_decodes]], dtype=np.int64)


def _most_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + request.max_new_tokens


def _is(one: object, other: object) -> bool:
    return one is other


def _decodes_first(batches: Sequence[ScheduledBatch]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The step's order of the requests of all batches, one behind another; and the places of each batch's requests."""
    is_decode = np.concatenate([np.arange(batch.num_requests) < batch.num_decodes for batch in batches])
    taken = np.argsort(~is_decode, kind="stable")
    places = np.empty_like(taken)
    places[taken] = np.arange(taken.size)
    return taken, tuple(np.split(places, np.cumsum([batch.num_requests for batch in batches])[:-1]))


def _in_order(batches: Sequence[ScheduledBatch], name: str, taken: np.ndarray) -> np.ndarray:
    ordered: np.ndarray = np.concatenate([getattr(batch, name) for batch in batches])[taken]
    ordered.setflags(write=False)
    return ordered


def ranks_of(rows: np.ndarray, rows_of_rank: int) -> np.ndarray:
    """The rank of each row ≥ 1."""
    return (rows - 1) // rows_of_rank


def pages_of_rank(cleared_pages: np.ndarray, rank: int, num_pages: int) -> np.ndarray:
    """The pages of a step that are the rank's to clear, by their own ids."""
    owners, pages = np.divmod(cleared_pages, num_pages)
    own: np.ndarray = pages[owners == rank]
    return own


def copies_of_rank(copies: np.ndarray, request_column: int, rank: int, rows_of_rank: int) -> np.ndarray:
    """The copies of states, [N, 2] rows, that the rank makes, by the rows of its own pool of states. There its
    requests' rows begin at 1, and snapshots' rows follow, as among its scheduler's rows.

    Args:
        request_column: the one of the two that is a request's row, which says whose the copy is.
    """
    is_own = ranks_of(copies[:, request_column], rows_of_rank) == rank
    own: np.ndarray = copies[is_own] - rank * rows_of_rank
    return own


def batch_of_rank(batch: ScheduledBatch, rank: int, rows_of_rank: int) -> ScheduledBatch:
    """The rank's part of a step, without pages and copies; of a rank that has none, a decode of the dummy row."""
    is_own = ranks_of(batch.rows, rows_of_rank) == rank
    own = np.flatnonzero(is_own)
    if not own.size:
        return _DUMMY
    num_decodes = int((own < batch.num_decodes).sum())
    is_own_token = np.repeat(is_own, batch.num_new)
    of_decodes, of_prompts = np.split(is_own_token, [batch.num_decode_tokens])
    by_row: dict[str, Any] = {name: getattr(batch, name)[own] for name in _BY_ROW}
    return replace(
        _DUMMY,
        step_id=batch.step_id,
        requests=[batch.requests[place] for place in own.tolist()],
        num_decodes=num_decodes,
        num_tokens=int(by_row["num_new"].sum()),
        prefill_token_ids=batch.prefill_token_ids[of_prompts],
        verify_token_ids=batch.verify_token_ids[of_decodes] if batch.has_drafts else NO_DRAFTS,
        **by_row,
    )


def _nothing(dtype: type) -> np.ndarray:
    made: np.ndarray = np.empty(0, dtype=dtype)
    made.setflags(write=False)
    return made


_DUMMY = ScheduledBatch(
    step_id=0,
    requests=[None],  # type: ignore[list-item]  # their number is what is looked at
    rows=np.zeros(1, dtype=np.int32),
    num_new=np.ones(1, dtype=np.int32),
    prefix_lens=np.zeros(1, dtype=np.int32),
    num_decodes=1,
    num_tokens=1,
    page_rows=_nothing(np.int32),
    page_positions=_nothing(np.int32),
    page_ids=_nothing(np.int32),
    cleared_pages=_nothing(np.int32),
    prefill_token_ids=_nothing(np.int64),
    sample_mask=np.zeros(1, dtype=bool),
    rope_lens=np.zeros(1, dtype=np.int32),
    adapter_slots=np.full(1, -1, dtype=np.int32),
    prompt_logprob_rows=np.zeros(1, dtype=bool),
    admitted=[],
    state_restores=np.empty((0, 2), dtype=np.int64),
    state_saves=np.empty((0, 2), dtype=np.int64),
)
