"""An engine without a model and its memory behind the KV cache, on one clock: the real scheduler, prefix cache and
tiers; steps that take what was measured; copies that take their bytes over a link's rate.

One step is in flight while the next is scheduled, as engine/core/steps.py has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from benchmarks.fleet.step_costs import KEY_BYTES, StepCosts
from mllm_compile.runtime.config_sections import MaxStepMs
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.pace import load_of
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.schedule.tiers.tiers import Tiers

PAGE, MAX_RUNNING = 64, 256  # as the server's defaults
SECRET = b"simulated"
COPY_MS = 0.3  # of a copy, beside its bytes: queues and threads
HOST_MS = 0.7  # of the engine's thread, for a step


class LinkCopies:
    """A TierCopies of one link: loads follow each other, and stores beside them; both behind what was launched.

    Args:
        launched: gives the time at which the steps that were launched are over.
    """

    takes_writes, share_below, outlives = False, 1.0, False
    page_bytes, state_bytes = PAGE * KEY_BYTES, 0

    def __init__(self, bytes_s: float, now: Callable[[], float], launched: Callable[[], float]) -> None:
        self.wake = lambda: None
        self._bytes_s, self._now, self._launched = bytes_s, now, launched
        self._free = {"load": 0.0, "store": 0.0}
        self._begun: deque[tuple[float, Ticket]] = deque()

    def begin(self, ticket: Ticket) -> None:
        """Queues a copy."""
        start = max(self._free[ticket.kind], self._launched())
        ticket.seconds = len(ticket.entries) * self.page_bytes / self._bytes_s + COPY_MS / 1e3
        self._free[ticket.kind] = start + ticket.seconds
        ticket.failed = np.zeros(len(ticket.entries), dtype=bool)
        if ticket.kind == "store":
            ticket.from_below = ticket.failed.copy()
        self._begun.append((start + ticket.seconds, ticket))

    @property
    def next_end(self) -> float | None:
        """The time at which the next copy is over; None without one."""
        return min((end for end, _ in self._begun), default=None)

    def finished(self) -> list[Ticket]:
        """Copies that are over by now, in the order of their ends."""
        now = self._now()
        over = sorted((one for one in self._begun if one[0] <= now), key=lambda one: one[0])
        self._begun = deque(one for one in self._begun if one[0] > now)
        return [ticket for _, ticket in over]

    def remove(self, entry: Entry, is_state: bool) -> None:
        """Is for a tier below."""
        raise NotImplementedError("nothing is below")

    def void_kept(self) -> None:
        """Nothing is kept."""

    def clear_below(self) -> None:
        """Nothing is below."""

    def wait(self) -> None:
        """Is for an engine that sleeps or ends."""
        raise NotImplementedError("nobody waits for this clock")

    def close(self) -> None:
        """Has nothing to end."""


@dataclass(slots=True)
class _Step:
    """A step in flight, from `begun` to `end` on the device."""

    batch: ScheduledBatch
    begun: float
    end: float


class TieredEngine:
    """See the module's header.

    Args:
        kv_tokens, host_tokens: that the KV cache holds, and the memory behind it; 0: no memory.
        bytes_s: of the link, each way.
        over: told of a request that has ended, and when.
        admitted: told of one that has got its row.

    Attributes:
        now: seconds.
    """

    def __init__(
        self,
        costs: StepCosts,
        kv_tokens: int,
        host_tokens: int,
        over: Callable[[Request, float], None],
        admitted: Callable[[Request], None],
        *,
        max_step: int = 8192,
        max_step_ms: MaxStepMs = "tenfold",
        writes_through: bool = False,
        bytes_s: float = 50e9,
    ) -> None:
        self.now = 0.0
        self._costs, self._over, self._admitted = costs, over, admitted
        config = SchedulerConfig(
            max_running_requests=MAX_RUNNING,
            max_num_batched_tokens=max_step,
            max_model_len=min(kv_tokens, 40_960),
            page_size=PAGE,
            num_pages=kv_tokens // PAGE + 1,
            max_step_ms=max_step_ms,
        )
        self.scheduler = Scheduler(config)
        self._device_free = 0.0
        self._in_flight: deque[_Step] = deque()
        self._next_ids = np.zeros(MAX_RUNNING + 1, np.int64)  # by row
        self._answers: dict[Request, int] = {}  # the first ids of them
        self._copies: LinkCopies | None = None
        if host_tokens:
            self._copies = LinkCopies(bytes_s, lambda: self.now, lambda: max(self.now, self._device_free))
            host, pages = (TierIndex(host_tokens // PAGE), TierIndex(0)), self.scheduler.pages
            self.scheduler.use_tiers(Tiers(pages, self._copies, host, SECRET, writes_through=writes_through))

    def add(self, prompt: np.ndarray, num_out: int, first_id: int) -> Request:
        """A request of these ids [n] int64, which is answered by so many that begin with `first_id`."""
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        ids = cast("list[int]", range(prompt.size))
        request = Request(request_id="", prompt_token_ids=ids, prompt_ids=prompt, params=params)
        self._answers[request] = first_id
        self.scheduler.add(request)
        return request

    def turn(self, next_event: float | None) -> None:
        """One turn of the engine's thread; if it has nothing to do, the clock goes to the next event.

        Args:
            next_event: the time of the caller's own; None without one.
        """
        batch = self.scheduler.schedule()
        if batch is not None:
            self._launch(batch)
        if len(self._in_flight) > (0 if batch is None else 1):
            self._finish(self._in_flight.popleft())
        elif batch is None:
            of_copies = None if self._copies is None else self._copies.next_end
            ends = [one for one in (next_event, of_copies) if one is not None]
            if not ends:
                raise RuntimeError("the simulated engine has nothing to wait for")
            self.now = max(self.now, min(ends))

    @property
    def is_idle(self) -> bool:
        """No request is unanswered."""
        return not self._answers

    def _launch(self, batch: ScheduledBatch) -> None:
        for request in batch.admitted:
            self._next_ids[request.row] = self._answers[request] + len(request.output_token_ids)
            self._admitted(request)
        load = load_of(batch)
        ms = self._costs.decodes_ms(load, 1) + self._costs.prompts_ms(load, 1)
        self.now += HOST_MS / 1e3
        begun = max(self.now, self._device_free)
        self._device_free = begun + ms / 1e3
        self._in_flight.append(_Step(batch, begun, self._device_free))

    def _finish(self, step: _Step) -> None:
        self.now = max(self.now, step.end)
        batch = step.batch
        sampled = self._next_ids[batch.rows]
        self._next_ids[batch.rows] += batch.sample_mask
        self.scheduler.step_took(batch, step.end - step.begun)
        result = self.scheduler.update(batch, sampled)
        for request in result.finished:
            del self._answers[request]
            self._over(request, self.now)
        self.scheduler.finish_update()
