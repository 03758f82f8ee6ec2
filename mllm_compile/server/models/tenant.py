"""One model of several: its front, its engine, and what that holds of the device."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from mllm_compile.process.passage import close_all
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.engine_process import CommandLine
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.front import Front
from mllm_compile.server.models.engines import ServedEngine
from mllm_compile.server.models.shares import Share
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.spare import Spare
from mllm_compile.server.supervisor import PARKED
from mllm_compile.server.telemetry.tracing import Tracing
from mllm_compile.server.wire.messages import Needs

_MOST_STAGE_S = 900.0  # of a start, without a sign of life
_LOOK_S = 1.0  # between two looks at a start
_MOST_S = 300.0  # of a park or a wake: the first park takes the host's memory, about 10 GB a second


class Tenant(ServedEngine):
    """One model; for one event loop.

    Args:
        is_pinned: it is never parked.
        on_change: told that this one wants memory, or has given some back.
        spare: a process for an engine that is started again.

    Attributes:
        needs: of its device; None: not known yet.
        share: what it may take; a text: why nothing; None: not decided yet.
        waits_since: it wants memory since then, by time.monotonic(); None: it does not.
        is_awake: it holds `share.awake_bytes`.
        is_alive: it holds `share.held_bytes`.
        has_turn_since: it has been awake since then.
        switches: how often it was woken.
    """

    def __init__(
        self,
        name: str,
        options: ServeOptions,
        command_of: CommandLine,
        tracing: Tracing | None,
        memory: Memory,
        is_pinned: bool,
        on_change: Callable[[], None],
        spare: Spare | None = None,
    ) -> None:
        super().__init__(name, Front(options, command_of, tracing, landlord=self, memory=memory, spare=spare))
        self.is_pinned = is_pinned
        self._is_always_pinned = is_pinned
        self._on_change = on_change
        self.needs: Needs | None = None
        self.share: Share | str | None = None
        self.waits_since: float | None = None
        self.is_awake = self.is_alive = self._is_started = False
        self.has_turn_since = 0.0
        self.switches = 0
        self._ended = asyncio.Event()  # a start, by a ready engine or by its end

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits."""
        return self.front.is_idle and not self.front.supervisor.is_wanted

    @property
    def idle_since(self) -> float:
        return self.front.supervisor.worked_s

    # Told by its supervisor, as a Landlord ----------------------------------------------------------------------------

    def asks(self, needs: Needs) -> None:
        self.needs = needs
        self.wanted()

    def wanted(self) -> None:
        if self.waits_since is None:
            self.waits_since = time.monotonic()
            self._on_change()

    def gone(self) -> None:
        self.is_awake = self.is_alive = self._is_started = False
        self.is_pinned = self._is_always_pinned  # a new engine can be parked, where this one could not
        self.waits_since = None
        self._ended.set()
        self._on_change()

    # What the broker does with it -------------------------------------------------------------------------------------

    async def take(self, memory: Sequence[int]) -> None:
        """Starts the engine, or wakes it.

        Args:
            memory: of the device, that others have handed over, as descriptors, which are closed.

        Raises:
            ApiError: it cannot.
        """
        assert isinstance(self.share, Share), "a model without a share is refused"
        self.waits_since, self.is_awake, self.is_alive = None, True, True
        if not self._is_started:
            close_all(memory)  # a start looks at what the device has
            await self._start(self.share)
            return
        self.front.supervisor.give_memory(memory)
        try:
            await self._ask("wake_up")
        except ApiError:
            if self._is_started:  # a part of its memory may have fitted
                with contextlib.suppress(ApiError):
                    await self._ask("park")
                close_all(self.front.supervisor.take_memory())
            self.is_awake = False
            raise
        self.switches += 1
        self._begin_turn()
        self.front.supervisor.go_on()

    def _begin_turn(self) -> None:
        self.has_turn_since = time.monotonic()
        self.waits_since = None  # what has come meanwhile has its turn too

    async def _start(self, share: Share) -> None:
        self._ended.clear()
        supervisor = self.front.supervisor
        supervisor.grant(share.kv_tokens)
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._ended.wait()
            if not self._ended.is_set() and time.monotonic() - supervisor.stage_alive_s > _MOST_STAGE_S:
                supervisor.end_start(f"its start hangs: nothing of {supervisor.stage} for {_MOST_STAGE_S:g} s")
                await self._ended.wait()

    def ready(self, held_bytes: tuple[int, int]) -> None:
        """Its engine has started."""
        assert isinstance(self.share, Share), "an engine starts with a share"
        self.share = Share(self.share.kv_tokens, *held_bytes)
        self._is_started = True
        self._begin_turn()
        self._ended.set()

    async def park(self) -> list[int]:
        """Takes its memory back; requests that run are set aside, and computed anew at its next turn.

        Returns:
            What it hands over of the device, as descriptors, which are the caller's: each is closed or given to `take`.

        Raises:
            ApiError: it cannot.
        """
        supervisor = self.front.supervisor
        supervisor.set_aside()
        try:
            await self._ask("park")
        except ApiError:
            close_all(supervisor.take_memory())  # a part may have come before the error
            if supervisor.state == PARKED:
                supervisor.go_on()
            raise
        self.is_awake = False
        if not self.is_idle:
            self.wanted()
        return supervisor.take_memory()

    async def _ask(self, call: str) -> Any:
        calls = self.front.rollouts
        assert calls is not None, "fronts of many models have them"
        try:
            async with asyncio.timeout(_MOST_S):
                return await calls.ask(call)
        except TimeoutError:
            self.front.supervisor.kill()  # it may hold memory, and nobody else looks whether a parked one is stuck
            raise ApiError(503, f"the engine has not answered {call} for {_MOST_S:g} s", code="engine_stuck") from None
