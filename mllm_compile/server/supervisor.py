"""Keeps an engine running: starts it, sees that it is stuck or dead and starts it again, lets it sleep, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from mllm_compile.engine.stats import HistogramSnapshot
from mllm_compile.errors import MllmError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.process.passage import close_all
from mllm_compile.server.api.errors import ApiError, not_ready
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.engine_link import EngineLink
from mllm_compile.server.engine_process import CommandLine, EarlyEngine, EngineProcess
from mllm_compile.server.kept_memory import KeptMemory
from mllm_compile.server.spare import Spare
from mllm_compile.server.wire.messages import (
    AdapterCard,
    AdaptersChanged,
    Begin,
    Command,
    Controlled,
    EngineEvent,
    Failed,
    Grant,
    Hello,
    Needs,
    PagesChanged,
    Pooled,
    Pulse,
    SessionTold,
    Stage,
)

logger = logging.getLogger("mllm_compile.server")

STARTING, READY, ASLEEP, PARKED, ENDED = "starting", "ready", "asleep", "parked", "ended"
TAKES_REQUESTS = (READY, ASLEEP, PARKED)
_TICK_S = 0.25
_AT_REST = {"running": 0, "waiting": 0, "kv_pages_used": 0, "tokens_per_second": 0.0, "prompt_tokens_per_second": 0.0}
_STEPS_TO_BE_STUCK = 100
_TIMES_UNTIL_KILLED = 3  # of the time after which a step counts as stuck
_MOST_FAILED_STARTS = 5


class EngineFailedError(MllmError):
    """The engine cannot be started."""


class Landlord(Protocol):
    """Shares a device out among engines of several models; told of one engine."""

    def asks(self, needs: Needs) -> None:
        """It waits for the memory that it starts with: `grant` gives it, `refuse_start` does not."""

    def wanted(self) -> None:
        """Requests wait for it while it is parked."""

    def gone(self) -> None:
        """Its process has ended, and holds nothing."""


class Supervisor:
    """Keeps an engine running.

    Args:
        command_of: the engine's command line.
        sleep_after_s: without work for so long it is ended until a request comes; None: never.
        stuck_after_s: least time after which a step counts as stuck.
        on_step: takes the frames of steps.
        on_ready: told of each engine that is ready.
        on_lost: told why an engine is gone that was not to end.
        is_idle: True while there is no work.
        on_adapters: told of loads and unloads that are over.
        adapters: those that the next engine is to have, where another one was ready before it.
        on_controlled: told of calls that are over.
        on_pooled: told of texts that are answered.
        on_pages: told how an engine's prefix cache has changed; None where an engine is gone.
        on_session: told of sessions that were asked for.
        landlord: shares the device out; None: it is the engine's alone.
        name: of the model, where a server has several.
        environment: variables of the engine's process.
        early: the first engine's process, which was started ahead; None: it was not.
        spare: a process that an engine becomes which is started again; None: each starts anew.

    Attributes:
        failure: why there will be no engine.
        stage, stage_since_s: of the start that is on.
        stage_alive_s: when that start has shown a sign of life for the last time.
        stats: the engine's last figures.
        restarts: how often an engine was lost.
        worked_s: when it had work for the last time, by time.monotonic().
    """

    def __init__(
        self,
        command_of: CommandLine,
        *,
        sleep_after_s: float | None,
        stuck_after_s: float,
        on_step: Callable[[bytes], None],
        on_ready: Callable[[EngineFacts], None],
        on_lost: Callable[[ApiError], None],
        is_idle: Callable[[], bool],
        on_adapters: Callable[[AdaptersChanged], None],
        adapters: Callable[[], list[AdapterCard]],
        on_controlled: Callable[[Controlled], object],
        on_pooled: Callable[[Pooled], None],
        on_pages: Callable[[PagesChanged | None], None],
        on_session: Callable[[SessionTold], None],
        landlord: Landlord | None = None,
        name: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        early: EarlyEngine | None = None,
        spare: Spare | None = None,
    ) -> None:
        self._command_of = command_of
        self._early, self._spare = early, spare
        self._sleep_after_s = sleep_after_s
        self._stuck_after_s = stuck_after_s
        self._on_step = on_step
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._is_idle = is_idle
        self._on_adapters = on_adapters
        self._adapters = adapters
        self._on_pooled = on_pooled
        self._on_controlled = on_controlled
        self._on_pages = on_pages
        self._on_session = on_session
        self._landlord = landlord
        self._environment = environment
        self._engine = f"the engine of {name}" if name else "the engine"
        self._refusal: tuple[int, ApiError | None] = (0, None)  # how many there were, and the last one
        self.failure: str | None = None
        self.state = STARTING
        self.stage = "start"
        self.stage_since_s = self.stage_alive_s = time.monotonic()
        self.stats: dict[str, object] = {}
        self.restarts = 0
        self.facts: EngineFacts | None = None
        self._link: EngineLink | None = None
        self._hello: asyncio.Future[Hello] | None = None
        self._failure: Failed | None = None
        self._pulse_s = 0.0
        self.worked_s = 0.0
        self._ready = asyncio.Event()
        self._num_waiting = 0  # callers of `ready`
        self._is_wanted = asyncio.Event()  # a request waits for a sleeping engine
        self._is_closing = asyncio.Event()

    async def ready(self) -> EngineFacts:
        """The facts of a ready engine; wakes one that sleeps, waits for one that starts.

        Raises:
            ApiError: there will be none.
        """
        self._num_waiting += 1
        try:
            while self.state != READY:
                if self.failure is not None:
                    raise not_ready(f"the model cannot be served: {self.failure}", "engine_failed")
                if self.state == ENDED or self._is_closing.is_set():
                    raise not_ready("the server is shutting down", "shutting_down")
                before, _ = self._refusal
                self.want()
                self._ready.clear()
                await self._ready.wait()
                number, error = self._refusal
                if number != before and error is not None:
                    raise error
            assert self.facts is not None, "a ready engine has told them"
            return self.facts
        finally:
            self._num_waiting -= 1

    @property
    def is_wanted(self) -> bool:
        """True if requests wait for the engine, or have since it was last ready."""
        return self._num_waiting > 0 or self._is_wanted.is_set()

    def want(self) -> None:
        """Tells that requests wait for the engine."""
        self._is_wanted.set()
        if self._landlord is not None and self.state == PARKED:
            self._landlord.wanted()

    def refuse(self, error: ApiError) -> None:
        """Tells the requests that wait for a parked engine that it cannot run now."""
        self._refusal = (self._refusal[0] + 1, error)
        self._is_wanted.clear()
        self._ready.set()

    # --- its share of a device ----------------------------------------------------------------------------------------

    def grant(self, kv_tokens: int) -> None:
        """Lets an engine that waits for memory start, with a KV cache of so many tokens."""
        self.stage_alive_s = time.monotonic()  # the wait is over; no stage of the start is known yet
        self.send(Grant(kv_tokens))

    def refuse_start(self, why: str) -> None:
        """Ends an engine that waits for memory, for good."""
        self._failure = Failed(why, is_mistake=True)
        self.kill()

    def end_start(self, why: str) -> None:
        """Ends a start that hangs. Another one follows, unless it was the first."""
        self._failure = Failed(why, is_mistake=False)
        self.kill()

    def give_memory(self, descriptors: Sequence[int]) -> None:
        """Sends the engine memory of its device, which it takes when it is woken; closes the descriptors."""
        if self._link is None:
            close_all(descriptors)
        else:
            self._link.passage.give(descriptors)

    def take_memory(self) -> list[int]:
        """Takes what the engine has handed over of its device: descriptors, which are the caller's."""
        return [] if self._link is None else self._link.passage.take()

    def set_aside(self) -> None:
        """Hands the engine no further requests: those that come wait."""
        self.stage, self.stage_since_s = "wait for memory", time.monotonic()
        self._is_wanted.clear()
        self._enter(PARKED)

    def go_on(self) -> None:
        """Hands the engine requests again."""
        self._pulse_s = self.worked_s = time.monotonic()
        self._is_wanted.clear()
        self._enter(READY)

    def kill(self) -> None:
        """Ends an engine that does not answer; another one starts."""
        if self._link is not None:
            self._link.kill()

    def send(self, command: Command) -> None:
        """Sends a command to the engine, if there is one."""
        if self._link is not None:
            self._link.send(command)

    def stuck_for(self) -> float | None:
        """Seconds since the engine should have given a sign of life; None while it is well."""
        if self.state != READY:
            return None
        silent = time.monotonic() - self._pulse_s
        return silent if silent > self._stuck_limit() else None

    def _stuck_limit(self) -> float:
        histogram = self.stats.get("time_between_tokens")
        usual = HistogramSnapshot(**histogram).quantile(0.5) if isinstance(histogram, dict) else None
        return max(self._stuck_after_s, _STEPS_TO_BE_STUCK * (usual or 0.0))

    def close(self) -> None:
        """Ends the engine, and `run`, soon; requests that wait for an engine are refused at once."""
        self._is_closing.set()
        self._is_wanted.set()
        self._ready.set()

    # --- its life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until `close`.

        Raises:
            EngineFailedError: the engine cannot be started.
        """
        failed_starts = 0
        started, kept = (None, KeptMemory()) if self._early is None else self._early.take()
        try:
            while not self._is_closing.is_set():
                process, started = started, None
                if process is None:
                    process = EngineProcess(self._command_of, kept, self._environment, self._spare)
                if await self._live(kept, process):
                    failed_starts = 0
                    continue
                if self._is_closing.is_set():
                    return
                failed_starts += 1
                message = self._failure.message if self._failure else "the engine's process ended while it started"
                is_mistake = self._failure is not None and self._failure.is_mistake
                if self.facts is None or is_mistake or failed_starts == _MOST_FAILED_STARTS:
                    self.failure = message
                    raise EngineFailedError(message)
                logger.error("%s has not started: %s. Trying again.", self._engine, message)
                await self._wait(self._is_closing, 2.0**failed_starts)
        finally:
            if started is not None:
                started.kill()
            kept.close()
            self.state = ENDED
            self._ready.set()

    async def _live(self, kept: KeptMemory, process: EngineProcess) -> bool:
        """One engine, from its start to its end; False: it was never ready."""
        self._enter(STARTING)
        self.stage, self.stage_since_s = "start", time.monotonic()
        self._failure = None
        self._hello = asyncio.get_running_loop().create_future()
        self._link = link = EngineLink(process, self._on_step, self._on_event)
        link.send(Begin(None if self.facts is None else self._adapters(), self._landlord is not None))
        try:
            if not await self._started(link, self._hello):
                await link.interrupt()
                return False
            await self._serve(link, kept)
            return True
        finally:
            self._link = None
            link.kill()
            self._on_pages(None)
            if self._landlord is not None:
                self._landlord.gone()

    async def _started(self, link: EngineLink, hello: asyncio.Future[Hello]) -> bool:
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(event.wait()) for event in (link.exited, self._is_closing)
        ]
        await asyncio.wait([hello, *ends], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not hello.done():
            return False
        self.stage = "load tokenizer"
        self.facts = await asyncio.to_thread(EngineFacts.of, hello.result(), self.facts)
        self.stats = hello.result().stats
        self._pulse_s = self.worked_s = time.monotonic()
        self._is_wanted.clear()
        self._enter(READY)
        self._on_ready(self.facts)
        if self._spare is not None:
            self._spare.prepare()
        return True

    async def _serve(self, link: EngineLink, kept: KeptMemory) -> None:
        """Watches a ready engine until it is to end, or is lost."""
        while not self._is_closing.is_set():
            if await self._wait(link.exited, _TICK_S):
                self._lost(self._failure.message if self._failure else f"its process ended ({_how(link.exit_code)})")
                return
            now = time.monotonic()
            stuck = self.stuck_for()
            if stuck is not None and stuck > _TIMES_UNTIL_KILLED * self._stuck_limit():
                link.kill()
                self._lost(f"a step was stuck for {stuck:.0f} s")
                return
            if not self._is_idle():
                self.worked_s = now
            elif self._sleep_after_s is not None and now - self.worked_s > self._sleep_after_s:
                await self._sleep(link, kept)
                return
        await link.close()

    def _lost(self, why: str) -> None:
        self.restarts += 1
        self._enter(STARTING)
        logger.error("%s is lost: %s. Starting it again.", self._engine, why)
        self._on_lost(not_ready(f"{self._engine} is lost: {why}. It starts again.", "engine_lost"))

    async def _sleep(self, link: EngineLink, kept: KeptMemory) -> None:
        logger.info("no request for %g s: the engine sleeps until the next one", self._sleep_after_s)
        self._is_wanted.clear()
        self._enter(ASLEEP)
        await link.close()
        if kept.num_bytes:
            logger.info("its prefixes keep %s of the host's memory meanwhile", format_bytes(kept.num_bytes))
        await self._is_wanted.wait()

    def _enter(self, state: str) -> None:
        self.state = state
        if state != READY and self.stats:
            self.stats = self.stats | _AT_REST
        self._ready.set()  # the waiting thread looks again

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> bool:
        """True once the event is set, False after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await event.wait()
        return False

    def _on_event(self, event: EngineEvent) -> None:
        if isinstance(event, Pulse):
            self._pulse_s = time.monotonic()
            self.stats = event.stats
        elif isinstance(event, Stage):
            self.stage_alive_s = time.monotonic()
            if event.name != self.stage:
                self.stage, self.stage_since_s = event.name, self.stage_alive_s
        elif isinstance(event, AdaptersChanged):
            self._on_adapters(event)
        elif isinstance(event, PagesChanged):
            self._on_pages(event)
        elif isinstance(event, SessionTold):
            self._on_session(event)
        elif isinstance(event, Pooled):
            self._on_pooled(event)
        elif isinstance(event, Controlled):
            self._on_controlled(event)
        elif isinstance(event, Failed):
            self._failure = event
        elif isinstance(event, Needs):
            assert self._landlord is not None, "an engine asks for memory only if it was told to"
            self._landlord.asks(event)
        elif self._hello is not None and not self._hello.done():
            self._hello.set_result(event)


def _how(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
