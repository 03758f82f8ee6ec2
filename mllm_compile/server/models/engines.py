"""Several engines behind one front: their states, their lives, their ends. What differs is below: models, replicas.

Each engine has a front and a supervisor of its own, as a server of one has. Here is what they share.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, TypeVar

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.front import Front
from mllm_compile.server.http import Bodies, Scope
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.supervisor import PARKED, READY, EngineFailedError
from mllm_compile.server.telemetry.request_log import request_refused

logger = logging.getLogger("mllm_compile.server")


class ServedEngine:
    """One engine of several, and its front.

    Args:
        name: by which figures and states have it.
    """

    def __init__(self, name: str, front: Front) -> None:
        self.name, self.front = name, front

    @property
    def state(self) -> str:
        """running, parked, loading or failed."""
        supervisor = self.front.supervisor
        if supervisor.failure is not None:
            return "failed"
        return {READY: "running", PARKED: "parked"}.get(supervisor.state, "loading")


E = TypeVar("E", bound=ServedEngine)


class EnginesFront(Generic[E]):
    """The engines of one server.

    Attributes:
        kind: what each engine is, as figures name its label.
        engines: by name; there is one at least.
        begun: set once each engine is ready or has failed.

    Args:
        say: tells the operator a line.
    """

    kind: ClassVar[str]

    def __init__(self, options: ServeOptions, say: Callable[[str], None]) -> None:
        self.options, self._say = options, say
        self.memory = Memory()
        self.bodies = Bodies(options.most_body_bytes)
        self.forms = Bodies.of_sounds()
        self.is_draining = False
        self.engines: dict[str, E] = {}
        self.begun = asyncio.Event()

    # Requests ---------------------------------------------------------------------------------------------------------

    def engine_of_body(self, scope: Scope, path: str, body: bytes) -> E:
        """The engine that a request with a body goes to.

        Raises:
            ApiError: no engine is meant.
        """
        raise NotImplementedError

    def engine_of_query(self, scope: Scope) -> E:
        """The engine of a request without a body.

        Raises:
            ApiError: no engine is meant.
        """
        raise NotImplementedError

    def serving(self, engine: E) -> AbstractContextManager[None]:
        """A context for as long as an engine has a request."""
        return nullcontext()

    def cards(self) -> list[dict[str, Any]]:
        """The models and adapters, as /v1/models lists them.

        Raises:
            ApiError: their names are not known yet.
        """
        raise NotImplementedError

    def card(self, name: str) -> dict[str, Any]:
        """The card of a model or an adapter.

        Raises:
            ApiError: nothing has that name.
        """
        raise NotImplementedError

    def devices(self) -> dict[str, Any]:
        """The devices, by name."""
        raise NotImplementedError

    def refused(self, error: ApiError, path: str, client: str) -> None:
        """Logs and counts a request that came to no engine; the first one's figures have it."""
        request_refused(error, self.first.front.metrics, path, client)

    @property
    def first(self) -> E:
        """The first engine, which answers what all answer alike."""
        return next(iter(self.engines.values()))

    # State ------------------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """Name → running, parked, loading or failed."""
        return {name: one.state for name, one in self.engines.items()}

    def health(self) -> tuple[bool, dict[str, Any]]:
        """True unless no engine will be there: one that is lost or stuck starts again by itself."""
        states = self.states()
        is_well = any(state != "failed" for state in states.values())
        return is_well, {"state": self._state(), f"{self.kind}s": states}

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """True once each engine is ready or has failed, and one is served."""
        is_ready = self.begun.is_set() and self.health()[0] and not self.is_draining
        return is_ready, {"state": self._state(), f"{self.kind}s": self.states()}

    def _state(self) -> str:
        if self.is_draining:
            return "draining"
        return "ready" if self.begun.is_set() else "starting"

    def _look_whether_begun(self) -> None:
        if all(self._has_begun(one) for one in self.engines.values()):
            self.begun.set()

    @staticmethod
    def _has_begun(engine: ServedEngine) -> bool:
        return engine.front.supervisor.facts is not None or engine.state == "failed"

    def _ready(self, engine: E, facts: EngineFacts) -> None:
        hello = facts.hello
        self._say(f"{self._called(engine)}: {hello.kv_tokens:,} KV tokens, ready in {hello.seconds:.1f} s")
        self._look_whether_begun()

    def _called(self, engine: E) -> str:
        """An engine's name in lines to the operator."""
        return engine.front.options.name_in_log

    # Life -------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs all engines until `close`.

        Raises:
            EngineFailedError: none of them can be started.
        """
        engines = asyncio.gather(*(self._run(one) for one in self.engines.values()))
        works: list[asyncio.Future[Any]] = [engines, *map(asyncio.ensure_future, self._beside())]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in works[1:]:
                if work.done():
                    work.result()  # it ends by a fault of its own alone
            failures = await engines
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)  # engines are killed by then
        if all(failures):
            called = map(self._called, self.engines.values())
            reasons = (why.removesuffix(".") for why in failures if why is not None)
            raise EngineFailedError("; ".join(f"{name}: {why}" for name, why in zip(called, reasons, strict=True)))

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        """The works that run for as long as the engines do."""
        return []

    async def _run(self, engine: E) -> str | None:
        """Runs an engine; returns why it cannot be started."""
        try:
            await engine.front.supervisor.run()
        except EngineFailedError as error:
            self._say(f"{self._called(engine)}: failed: {error}")
            self._failed(engine)
            self._look_whether_begun()
            return str(error)
        return None

    def _failed(self, engine: E) -> None:
        """Told of an engine that will not be there."""

    async def sweep(self) -> None:
        """Ends requests that wait too long, until it is cancelled."""
        await asyncio.gather(*(one.front.sweep() for one in self.engines.values()))

    async def drain(self) -> None:
        """Takes no more requests; lets those that run end, within the time that they have."""
        self.is_draining = True
        await asyncio.gather(*(one.front.drain() for one in self.engines.values()))

    def end(self) -> None:
        """Ends the requests that still run."""
        self.is_draining = True
        for one in self.engines.values():
            one.front.end()

    def close(self) -> None:
        """Ends the engines, and `run`, soon."""
        for one in self.engines.values():
            one.front.supervisor.close()
