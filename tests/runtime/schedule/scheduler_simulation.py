"""A model without weights behind the scheduler: KV is a hash of the prefix, the next token a hash of all KV it reads.

A page shared wrongly, read before it is written, or handed to two requests changes the output; so does a token lost,
doubled or computed twice. The output is compared with `answer`, the same model run alone and without pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from zlib import crc32

import numpy as np

from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.pace import load_of
from mllm_compile.runtime.schedule.pages.page_run import PageRun
from mllm_compile.runtime.schedule.pages.tables import PageTables
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.speculation.drafter import Speculation

EOS, STOP, VOCAB = 0, 1, 29
_MASK = (1 << 61) - 1


FREE = {"ignore_eos": True}  # an answer as long as max_tokens


def prompt_of(length: int, first: int = 2) -> list[int]:
    return [(first + i * i) % 23 for i in range(length)]


def make_request(
    request_id: str, prompt: list[int], *, priority: int = 0, salt: tuple = (), **params: object
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        eos_token_ids=frozenset({EOS}),
        priority=priority,
        cache_salt=salt,
    )


def make_config(**changes: object) -> SchedulerConfig:
    values = {"max_running_requests": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    return SchedulerConfig(**({**values, "page_size": 4, "num_pages": 33} | changes))


def _known_tokens(request: Request) -> list[int]:
    """The prompt by what its keys and values depend on: of a token that takes a feature, its image and place in it."""
    return request.prompt_token_ids if request.media is None else [key & _MASK for key in request.media.keys.tolist()]


def _kv(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token * 7_919 + 12_345) & _MASK


def _start(salt: tuple) -> int:
    return crc32(repr(salt).encode())


def _next_token(kv_sum: int) -> int:
    return (kv_sum ^ (kv_sum >> 23)) % VOCAB


def answer(request: Request, max_new_tokens: int) -> tuple[list[int], str, int | None]:
    """The request's result when it runs alone: output tokens, finish reason, stop reason."""
    kv, kv_sum, params = _start(request.cache_salt), 0, request.params
    for token in _known_tokens(request):
        kv = _kv(kv, token)
        kv_sum += kv
    output: list[int] = []
    while True:
        token = _next_token(kv_sum)
        output.append(token)
        if len(output) >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return output, "stop", None
            if token in (params.stop_token_ids or ()):
                return output, "stop", token
        if len(output) == max_new_tokens:
            return output, "length", None
        kv = _kv(kv, token)
        kv_sum += kv


class FakeDevice:
    """Runs batches in order, with page table, KV and last tokens of its own, as the step runner would."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        num_rows = config.max_running_requests + 1
        self.page_table = np.zeros((num_rows, config.max_tokens_per_request // config.page_size + 1), dtype=np.int64)
        self.kv = [[-1] * config.page_size for _ in range(config.num_pages)]
        self.last_tokens = [-1] * num_rows
        # The state after a row's last token, which is what the KV of that token is; rows of snapshots behind.
        self.has_states = config.num_snapshots > 0
        self.states = [-2] * (num_rows + config.num_snapshots)
        self.runs: dict[int, TokenRuns] = {}  # of verify steps, by number
        self.owners: dict[int, Request] = {}  # whose sampling parameters a row has

    def run(self, batch: ScheduledBatch) -> np.ndarray:
        """The sampled tokens; rows that are not sampled hold -1, so that taking one in is noticed."""
        self.owners |= {request.row: request for request in batch.admitted}
        rows = {*batch.rows.tolist(), *(request.row for request in batch.admitted)}
        assert set(batch.page_rows.tolist()) <= rows, "page writes concern rows of the batch"
        if batch.num_decodes == batch.num_requests and not batch.has_drafts:
            self._check_new_pages(batch)
        self.page_table[batch.page_rows, batch.page_positions] = batch.page_ids
        self._copy_states(batch.state_restores)
        sampled = np.full(batch.num_requests, -1, dtype=np.int64)
        taken = taken_of_decodes = 0
        width = int(batch.num_new[: batch.num_decodes].max(initial=1))
        choices = np.full((batch.num_requests, width), -1, dtype=np.int64)
        drafted = np.where(np.arange(batch.num_requests) < batch.num_decodes, batch.num_new - 1, 0)
        nothing = np.zeros(batch.num_requests, int)
        runs = TokenRuns(choices, nothing, nothing.astype(bool), drafted)
        if batch.has_drafts:
            self.runs[batch.step_id] = runs
        for i, (request, row, prefix_len, num_new) in enumerate(
            zip(batch.requests, batch.rows.tolist(), batch.prefix_lens.tolist(), batch.num_new.tolist(), strict=True)
        ):
            assert self.owners[row] is request, "a row has another's parameters"
            if i < batch.num_decodes and batch.has_drafts:
                tokens = batch.verify_token_ids[taken_of_decodes : taken_of_decodes + num_new].tolist()
                taken_of_decodes += num_new
                assert tokens[0] == self.last_tokens[row]
                assert all(0 <= token < VOCAB for token in tokens), "a draft ends ahead of what is no token"
                accepted = self._verify(row, prefix_len, tokens, _start(request.cache_salt))
                runs.token_ids[i, : len(accepted)], runs.counts[i] = accepted, len(accepted)
                sampled[i] = self.last_tokens[row] = accepted[-1]
                continue
            if i < batch.num_decodes:
                tokens = [self.last_tokens[row]]
            else:
                tokens = batch.prefill_token_ids[taken : taken + num_new].tolist()
                taken += num_new
            if i >= batch.num_decodes and request.media is not None:
                _check_images(request.media, prefix_len + num_new)
                known = _known_tokens(request)[prefix_len:]
                tokens = [*known, *tokens[len(known) :]][:num_new]
            kv_sum = self._compute(row, prefix_len, tokens, _start(request.cache_salt))
            if batch.sample_mask[i]:
                sampled[i] = self.last_tokens[row] = _next_token(kv_sum)
                runs.token_ids[i, 0], runs.counts[i] = sampled[i], 1
        assert taken_of_decodes == batch.verify_token_ids.size
        assert taken == batch.prefill_token_ids.size, "prefill tokens are those of the prefill rows"
        assert set(batch.state_saves[:, 0].tolist()) <= set(batch.rows[batch.num_decodes :].tolist()), (
            "of prompts alone"
        )
        self._copy_states(batch.state_saves)
        return sampled

    def _verify(self, row: int, prefix_len: int, tokens: list[int], start: int) -> list[int]:
        """All of a draft is computed, and its longest right beginning accepted; the state is the one behind that."""
        choices, states = [], []
        for place, token in enumerate(tokens):
            choices.append(_next_token(self._compute(row, prefix_len + place, [token], start)))
            states.append(self.states[row])
        count = 1
        while count < len(tokens) and choices[count - 1] == tokens[count]:
            count += 1
        self.states[row] = states[count - 1]
        return choices[:count]

    def _copy_states(self, copies: np.ndarray) -> None:
        assert len(set(copies[:, 1].tolist())) == len(copies), "two copies to one row"
        for source, target in copies.tolist():
            self.states[target] = self.states[source]

    def _check_new_pages(self, batch: ScheduledBatch) -> None:
        """Decodes alone get no page but what begins with their new token: captured ones hear of no other."""
        starts = dict(zip(batch.rows.tolist(), batch.prefix_lens.tolist(), strict=True))
        for row, position in zip(batch.page_rows.tolist(), batch.page_positions.tolist(), strict=True):
            assert starts[row] == position * self.page_size

    def _compute(self, row: int, prefix_len: int, tokens: list[int], start: int) -> int:
        pages = self.page_table[row].tolist()
        kv_sum, kv = 0, start
        for position in range(prefix_len):
            kv = self.kv[pages[position // self.page_size]][position % self.page_size]
            kv_sum += kv
        if self.has_states and prefix_len:
            assert self.states[row] == kv, "the row's state is that of its prefix"
        for position, token in enumerate(tokens, start=prefix_len):
            page = pages[position // self.page_size]
            assert page > 0, "nobody writes to the dummy page"
            kv = _kv(kv, token)
            self.kv[page][position % self.page_size] = kv
            kv_sum += kv
        self.states[row] = kv
        return kv_sum


def _check_images(media: RequestMedia, end: int) -> None:
    if media.sees_ahead:
        assert not any(image.start < end < image.end for image in media.images), "a chunk has all of an image"


def linear_ms(
    batch: ScheduledBatch, *, step: float = 3.0, token: float = 0.02, pair: float = 1e-6, key: float = 1e-5
) -> float:
    """Time of a step of a model whose weights are read once: its decodes are nearly free, its prompts are not."""
    load = load_of(batch)
    prompts = token * load.prompt_tokens + pair * load.prompt_pairs
    return max(step, prompts + token * load.num_decodes) + key * load.decode_keys


class Simulation:
    """Scheduler and device, with up to `steps_ahead` steps planned before the oldest one's tokens are known.

    `ms_of` says how long a step takes by a clock that does not run; None: nobody tells the scheduler.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        steps_ahead: int = 0,
        ms_of: Callable[[ScheduledBatch], float] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.config = config
        self.ms_of = ms_of
        self.speculates = speculation is not None
        self.scheduler = Scheduler(config, speculation=speculation)
        self.device = FakeDevice(config)
        self.steps_ahead = steps_ahead
        self.in_flight: deque[tuple[ScheduledBatch, np.ndarray]] = deque()
        self.requests: list[Request] = []
        self.num_steps = 0

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def plan(self) -> ScheduledBatch | None:
        """Schedule one batch and run it; its tokens are kept back until collect."""
        batch = self.scheduler.schedule()
        self._check_the_most_urgent_moves(batch)
        if batch is not None:
            self.num_steps += 1
            check_batch(batch, self.config)
            self.in_flight.append((batch, self.device.run(batch)))
        return batch

    def _check_the_most_urgent_moves(self, batch: ScheduledBatch | None) -> None:
        """No request starves: the first in order is in every step. Exceptions are steps that wait for pages, and the
        step of its admission, where an image may have had no room."""
        waits = [] if batch is None else [one for one in batch.admitted if one not in batch.requests]
        running = self.scheduler.prompts.begun + self.scheduler.decodes.requests
        running = [request for request in running if request not in waits]
        awaits_tokens = self.speculates and self.in_flight
        tiers = self.scheduler.tiers
        awaits_copies = tiers is not None and tiers.is_busy  # stores lock pages
        if running and not self.scheduler.rows.leaving and not awaits_tokens and not awaits_copies:
            assert batch is not None and min(running, key=lambda request: request.urgency) in batch.requests

    def collect(self) -> list[Request]:
        """Hand the oldest step's tokens to the scheduler; the requests that this ended."""
        if self.ms_of is not None:
            batch, _ = self.in_flight[0]
            self.scheduler.step_took(batch, self.ms_of(batch) / 1e3)
        batch, sampled = self.in_flight.popleft()
        return self.scheduler.update(batch, sampled, runs=self.device.runs.pop(batch.step_id, None)).finished

    def lose(self) -> None:
        """An engine's reaction to a step that cannot be launched."""
        batch = self.scheduler.schedule()
        while self.in_flight:
            self.collect()
        if batch is not None:
            self.scheduler.fail(batch)

    def step(self) -> ScheduledBatch | None:
        """One round of an engine's loop."""
        batch = self.plan()
        if self.in_flight and (batch is None or len(self.in_flight) > self.steps_ahead):
            self.collect()
        return batch

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not (self.scheduler.has_work() or self.scheduler.has_idle_work):
                return
            self.step()
        raise AssertionError(f"work left after {max_steps} steps: {self.scheduler.stats()}")

    def check_answers(self) -> None:
        """All requests have ended with their own answer, or with its beginning if they were ended from outside."""
        for request in self.requests:
            output, reason, stop_reason = answer(request, request.max_new_tokens)
            assert request.status is RequestStatus.FINISHED
            if request.finish_reason == "abort" or request.stop_reason == "outside":
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason, request.stop_reason) == (
                    output,
                    reason,
                    stop_reason,
                )

    def check_all_returned(self) -> None:
        """Nothing is held: every page is free or an unused one of the prefix cache; every slot is free."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert self.scheduler.rows.num_free == self.config.max_running_requests
        check_pages(self.scheduler.pages)
        self.scheduler.flush_prefix_cache()
        assert self.scheduler.pages.allocator.available_pages == self.config.usable_pages
        states = self.scheduler.pages.cache.states
        assert (states.num_free, states.num_kept) == (self.config.num_snapshots, 0), "a row of states is nobody's"


def check_batch(batch: ScheduledBatch, config: SchedulerConfig) -> None:
    """Invariants that every reader of a batch relies on."""
    rows = batch.rows.tolist()
    assert len(set(rows)) == len(rows) == batch.num_requests > 0
    assert 0 not in rows
    assert batch.num_tokens == batch.num_new.sum() <= config.max_num_batched_tokens
    assert (batch.num_new >= 1).all()
    assert batch.num_new[: batch.num_decodes].sum() == batch.num_decode_tokens
    assert batch.sample_mask[: batch.num_decodes].all()
    assert (batch.seq_lens < config.max_model_len).all()
    assert rows == [request.row for request in batch.requests]
    for array in (batch.rows, batch.num_new, batch.prefix_lens, batch.page_rows, batch.page_positions, batch.page_ids):
        assert array.dtype == np.int32
    assert batch.prefill_token_ids.dtype == np.int64
    assert batch.sample_mask.dtype == batch.prompt_logprob_rows.dtype == bool


def check_pages(pages: PageTables) -> None:
    """Each page that was handed out has exactly one owner, and locks match the rows' paths."""
    private: list[int] = []
    runs: set[PageRun] = set(pages.cache._unlocked)
    locks: dict[PageRun, int] = {}
    for row, path in enumerate(pages._paths):
        private += pages.table[row, pages._path_pages[row] : pages.num_pages[row]].tolist()
        run, depth = path, 0
        while run is not None and run.parent is not None:
            locks[run] = locks.get(run, 0) + 1
            run, depth = run.parent, depth + run.pages.size
        assert depth == pages._path_pages[row]
    runs |= set(locks)
    assert sum(run.pages.size for run in runs) == pages.cache.num_pages
    assert all(run.locks == locks.get(run, 0) for run in runs)
    owned = private + [page for run in runs for page in run.pages.tolist()]
    assert len(set(owned)) == len(owned), "a page has two owners"
    assert sorted(owned) == np.flatnonzero(pages.allocator.taken).tolist(), "a page is owned by nobody"
    assert len(owned) + pages.allocator.available_pages == pages.allocator.usable_pages
    states = pages.cache.states
    kept = list(states._rows.values())
    assert set(states._rows) <= runs, "a state of a page that is gone"
    assert len({*kept, *states._free}) == len(kept) + states.num_free <= states.count, "a row of states has two owners"


class GuessingDrafter:
    """Guesses of every kind: right ones, wrong ones, of any length, some beyond the vocabulary.

    Args:
        kinds: right, wrong, any, none: what is drawn from, for each draft.
    """

    def __init__(self, choose: Random, kinds: Sequence[str]) -> None:
        self.choose, self.kinds = choose, kinds
        self.live = 0

    def begin(self, prompt_token_ids: Sequence[int], salt: tuple) -> _Guesses:
        self.live += 1
        return _Guesses(self, list(prompt_token_ids), _start(salt))


class _Guesses:
    def __init__(self, drafter: GuessingDrafter, tokens: list[int], start: int) -> None:
        self.drafter, self.tokens, self.start = drafter, tokens, start

    def take(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)

    def propose(self, most: int) -> list[int]:
        choose, kind = self.drafter.choose, self.drafter.choose.choice(self.drafter.kinds)
        right = self._right(most + 1)
        if kind == "right":
            return right
        if kind == "wrong":
            return [(token + 1) % VOCAB for token in right[:most]]
        if kind == "none":
            return []
        guess = right[: choose.randint(0, most)]
        return guess + [choose.randint(-1, VOCAB) for _ in range(choose.randint(0, 2))]

    def _right(self, count: int) -> list[int]:
        kv, kv_sum = self.start, 0
        for token in self.tokens:
            kv = _kv(kv, token)
            kv_sum += kv
        found = []
        for _ in range(count):
            found.append(_next_token(kv_sum))
            kv = _kv(kv, found[-1])
            kv_sum += kv
        return found

    def end(self) -> None:
        self.drafter.live -= 1
