"""Figures of a running engine: counters, rates and latency histograms.

EngineStats is what `Engine.stats()` returns, a snapshot. StatsRecorder belongs to the engine's thread and is written
once a step, with numpy over the step's rows; it never looks at a request one by one.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mllm_compile.files.byte_sizes import format_bytes

if TYPE_CHECKING:
    from mllm_compile.runtime.schedule.config import SchedulerStats
    from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, UpdateResult
    from mllm_compile.runtime.schedule.tiers.figures import TierFigures

ForwardTimesSource = Callable[[], Iterable[tuple[int, int, float]]]
ExpertsSource = Callable[[], Mapping[str, Sequence[int]]]

_BUCKETS_A_DECADE = 5
_RATE_WINDOW_S = 10.0
_RATE_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The adapters of requests.

    Attributes:
        most: how many the device holds at once.
        waiting_requests: requests that wait for theirs.
        running: names of adapters with requests that run or wait for a place.
        waiting: names of adapters that requests wait for.
    """

    most: int
    waiting_requests: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts of observations in seconds.

    Attributes:
        bounds: upper bounds of the buckets; the last bucket (one more count than bounds) has none.
        counts: observations a bucket.
        total: sum of all observations.
        largest: the largest observation; 0 without any.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    largest: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """Estimate of the q-quantile (0 ≤ q ≤ 1), linear within a bucket, at most the largest; None without any."""
        if not self.count:
            return None
        rank = q * self.count
        for i, count in enumerate(self.counts):
            if count and rank <= count:
                low = self.bounds[i - 1] if i else 0.0
                high = self.bounds[i] if i < len(self.bounds) else low
                return min(low + (high - low) * rank / count, self.largest)
            rank -= count
        return self.largest


class Histogram:
    """Log-spaced buckets from `smallest` to `largest` seconds."""

    def __init__(self, smallest: float, largest: float) -> None:
        num = round(math.log10(largest / smallest) * _BUCKETS_A_DECADE) + 1
        self._bounds = np.geomspace(smallest, largest, num)
        self._counts = np.zeros(num + 1, dtype=np.int64)
        self._total = 0.0
        self._largest = 0.0

    def observe(self, seconds: np.ndarray) -> None:
        """Adds observations, float64 of any length."""
        np.add.at(self._counts, np.searchsorted(self._bounds, seconds, side="left"), 1)
        self._total += float(seconds.sum())
        if seconds.size:
            self._largest = max(self._largest, float(seconds.max()))

    def snapshot(self) -> HistogramSnapshot:
        bounds, counts = tuple(self._bounds.tolist()), tuple(self._counts.tolist())
        return HistogramSnapshot(bounds, counts, self._total, self._largest)


class RateMeter:
    """Events a second over the last ten seconds, or since the start while that is less."""

    def __init__(self, now: float) -> None:
        self._start = now
        self._ticks: deque[tuple[float, int]] = deque()  # (time, events from then until the next tick)

    def add(self, num: int, now: float) -> None:
        if self._ticks and now - self._ticks[-1][0] < _RATE_TICK_S:
            time, count = self._ticks[-1]
            self._ticks[-1] = (time, count + num)
        else:
            self._ticks.append((now, num))
            while now - self._ticks[0][0] > _RATE_WINDOW_S:
                self._ticks.popleft()

    def rate(self, now: float) -> float:
        recent = sum(count for time, count in self._ticks if now - time <= _RATE_WINDOW_S)
        return recent / max(min(now - self._start, _RATE_WINDOW_S), _RATE_TICK_S)


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """How long the model took for steps of one padded number of tokens, sampling and scheduling left out."""

    num_tokens: int
    count: int
    median_ms: float


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How often a layer's experts were chosen since the start; a token chooses several.

    Attributes:
        layer: its name in the model.
        counts: by expert.
    """

    layer: str
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of `Engine.stats()`. Counts are since the start.

    Attributes:
        running: requests that hold KV pages.
        waiting: requests that wait for a place.
        kv_pages_used: pages that requests hold, shared ones counted once.
        kv_pages_cached: pages that the prefix cache owns, in use or not.
        kv_pages_total: pages that there are.
        prefix_hit_tokens: prompt tokens found in the prefix cache.
        prefix_query_tokens: prompt tokens looked up.
        preemptions: requests put back to recompute, because pages ran out.
        recomputed_tokens: tokens whose KV these lost.
        generated_tokens: tokens handed out.
        prompt_tokens: prompt tokens computed; a recomputed one counts again.
        tokens_per_second: generated tokens, over the last ten seconds.
        prompt_tokens_per_second: prompt tokens, likewise.
        steps: steps of the model.
        finished: ended completions by finish reason.
        broken_logits: requests that ended because their logits held NaN or inf.
        time_to_first_token: seconds from arrival; has quantile(0.99) and largest.
        time_between_tokens: seconds from one token of a request to its next, likewise.
        step_bound_ms: what runtime.max_step_ms gave the last bounded step.
        forward_times: times by number of tokens; empty unless Engine(forward_times=True).
        experts: the load of each layer of experts; empty unless runtime.expert_stats.
        snapshots_kept: cached prefixes with their state, for models whose layers carry one.
        snapshots_total: how many there can be.
        snapshots_bytes: memory of those kept.
        sessions: sessions that are known.
        sessions_ended: those that a caller has ended.
        ended_pages_evicted: pages of no further use to their session that were given up for others.
        drafts: drafts that were checked.
        drafted_tokens: their tokens.
        accepted_tokens: those of them that became part of an answer.
        accepted_by_position: the same by place in the draft.
        adapters: the adapters in use; None unless lora.max_adapters.
        tiers: the memory behind the KV cache, one for each tier.
        sleep_host_bytes: bytes of the host's memory that copies of weights have, from the first sleep of level 1 on.
        held_seconds: since when a pause, an update or sleep has held all steps; 0: nothing does.
    """

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages_total: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    preemptions: int
    recomputed_tokens: int
    generated_tokens: int
    prompt_tokens: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    steps: int
    finished: Mapping[str, int]
    broken_logits: int
    time_to_first_token: HistogramSnapshot
    time_between_tokens: HistogramSnapshot
    step_bound_ms: float | None = None
    forward_times: tuple[ForwardTime, ...] = ()
    experts: tuple[ExpertLoad, ...] = ()
    snapshots_kept: int = 0
    snapshots_total: int = 0
    snapshots_bytes: int = 0
    sessions: int = 0
    sessions_ended: int = 0
    ended_pages_evicted: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    adapters: AdapterStats | None = None
    tiers: tuple[TierFigures, ...] = ()
    sleep_host_bytes: int = 0
    held_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a request in a step with a draft, on average; 1: none was accepted."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages that requests hold, 0 to 1."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that the prefix cache held, 0 to 1."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0

    def __str__(self) -> str:
        parts = [
            f"running {self.running}",
            f"waiting {self.waiting}",
            f"{self.tokens_per_second:.1f} tokens/s out",
            f"{self.prompt_tokens_per_second:.1f} tokens/s in",
            f"KV {self.kv_usage:.1%}",
            f"prefix hits {self.prefix_hit_rate:.1%}",
            f"preemptions {self.preemptions}",
        ]
        if self.snapshots_total:
            memory = format_bytes(self.snapshots_bytes)
            parts.append(f"states of prefixes {self.snapshots_kept} of {self.snapshots_total} ({memory})")
        if self.drafts:
            share = self.accepted_tokens / self.drafted_tokens
            parts.append(f"drafted tokens accepted {share:.1%} ({self.acceptance_length:.2f} tokens a draft)")
        if self.broken_logits:
            parts.append(f"requests with NaN or inf logits {self.broken_logits}")
        for name, histogram in (
            ("first token", self.time_to_first_token),
            ("between tokens", self.time_between_tokens),
        ):
            p50, p99 = histogram.quantile(0.5), histogram.quantile(0.99)
            if p50 is not None and p99 is not None:
                longest = f" longest {histogram.largest * 1e3:.1f} ms"
                parts.append(f"{name} p50 {p50 * 1e3:.1f} ms p99 {p99 * 1e3:.1f} ms{longest}")
        if self.step_bound_ms is not None:
            parts.append(f"steps with prompts up to {self.step_bound_ms:.1f} ms")
        return ", ".join(parts)


class StatsRecorder:
    """Collects the figures; all but `snapshot` is called on the engine's thread.

    Args:
        num_rows: rows that a step's `rows` point into.
        forward_times: gives (num_tokens, count, median in ms) rows.
        experts_chosen: gives each layer's counts by expert.
        snapshot_bytes: memory of the state of one cached prefix.
    """

    def __init__(
        self,
        num_rows: int,
        forward_times: ForwardTimesSource = tuple,
        experts_chosen: ExpertsSource = dict,
        snapshot_bytes: int = 0,
    ) -> None:
        now = time.monotonic()
        self._forward_times = forward_times
        self._experts_chosen = experts_chosen
        self._snapshot_bytes = snapshot_bytes
        self._last_token_time = np.zeros(num_rows, dtype=np.float64)  # by row
        self._first_token = Histogram(1e-3, 1e3)
        self._between_tokens = Histogram(1e-4, 1e2)
        self._generated = RateMeter(now)
        self._prompt = RateMeter(now)
        self._num_generated = 0
        self._num_prompt = 0
        self._num_steps = 0
        self._finished: Counter[str] = Counter()
        self._num_broken = 0
        self._num_drafts = self._num_drafted = 0
        self._accepted: list[int] = []  # by place in the draft

    def step_over(self, batch: ScheduledBatch, result: UpdateResult, now: float) -> None:
        """Counts a step.

        Args:
            now: time.monotonic() when the tokens had reached the host.
        """
        accepted = result.accepted
        num_generated = len(accepted) if result.counts is None else sum(result.counts)
        self._num_steps += 1
        self._num_generated += num_generated
        self._generated.add(num_generated, now)
        num_prompt = batch.num_prompt_tokens
        self._num_prompt += num_prompt
        self._prompt.add(num_prompt, now)
        num_decodes = bisect_left(accepted, batch.num_decodes)
        rows = batch.rows[np.array(accepted, dtype=np.intp)]
        gaps = now - self._last_token_time[rows[:num_decodes]]
        if result.counts is not None:  # the tokens of a run share their step
            counts = np.array(result.counts[:num_decodes])
            gaps = np.repeat(gaps / np.maximum(counts, 1), counts)
            if result.num_drafted is not None:
                self._count_drafts(result.num_drafted[: batch.num_decodes], counts)
        self._between_tokens.observe(gaps)
        self._last_token_time[rows] = now
        arrivals = [
            batch.requests[row].arrival_time
            for row in accepted[num_decodes:]
            if len(batch.requests[row].output_token_ids) == 1  # else it was preempted and is recomputed
        ]
        if arrivals:
            self._first_token.observe(now - np.array(arrivals))

    def _count_drafts(self, drafted: np.ndarray, counts: np.ndarray) -> None:
        """Counts the drafts of a verify step, whose decodes got so many tokens each."""
        self._num_drafts += int(np.count_nonzero(drafted))
        self._num_drafted += int(drafted.sum())
        longest = int(counts.max(initial=1)) - 1
        self._accepted += [0] * (int(drafted.max(initial=0)) - len(self._accepted))
        for place in range(longest):
            self._accepted[place] += int(np.count_nonzero(counts > place + 1))

    def completion_ended(self, finish_reason: str) -> None:
        self._finished[finish_reason] += 1

    def logits_were_no_numbers(self) -> None:
        """Counts a request that ended because its logits were no numbers."""
        self._num_broken += 1

    def snapshot(self, scheduler: SchedulerStats, adapters: AdapterStats | None = None) -> EngineStats:
        now = time.monotonic()
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting + (0 if adapters is None else adapters.waiting_requests),
            kv_pages_used=scheduler.pages_used,
            kv_pages_cached=scheduler.pages_cached,
            kv_pages_total=scheduler.pages_total,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_queried_tokens,
            preemptions=scheduler.preemptions,
            recomputed_tokens=scheduler.recomputed_tokens,
            snapshots_kept=scheduler.snapshots_kept,
            snapshots_total=scheduler.snapshots_total,
            snapshots_bytes=scheduler.snapshots_kept * self._snapshot_bytes,
            sessions=scheduler.sessions,
            sessions_ended=scheduler.sessions_ended,
            ended_pages_evicted=scheduler.ended_pages_evicted,
            generated_tokens=self._num_generated,
            prompt_tokens=self._num_prompt,
            tokens_per_second=self._generated.rate(now),
            prompt_tokens_per_second=self._prompt.rate(now),
            steps=self._num_steps,
            finished=dict(self._finished),
            broken_logits=self._num_broken,
            time_to_first_token=self._first_token.snapshot(),
            time_between_tokens=self._between_tokens.snapshot(),
            drafts=self._num_drafts,
            drafted_tokens=self._num_drafted,
            accepted_tokens=sum(self._accepted),
            accepted_by_position=tuple(self._accepted),
            step_bound_ms=scheduler.step_bound_ms,
            forward_times=tuple(ForwardTime(*row) for row in self._forward_times()),
            experts=tuple(ExpertLoad(layer, tuple(counts)) for layer, counts in self._experts_chosen().items()),
            adapters=adapters,
            tiers=scheduler.tiers,
        )
