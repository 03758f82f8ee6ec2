"""The front of a server of several models: theirs by name, its brokers, its life.

Each model has a front and a supervisor of its own, as a server of one has. Here is what they share.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.engine_link import CommandLine
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.http import Bodies
from mllm_compile.server.models.broker import Broker
from mllm_compile.server.models.tenant import Tenant
from mllm_compile.server.options import ModelsOptions, ServeOptions
from mllm_compile.server.supervisor import EngineFailedError
from mllm_compile.server.telemetry.request_log import request_refused
from mllm_compile.server.telemetry.tracing import Tracing

logger = logging.getLogger("mllm_compile.server")


class ModelsFront:
    """The models of one server.

    Attributes:
        begun: set once each model is served or has failed.

    Args:
        options: of the server, and of each model but for its name and source.
        command_of: an engine's command line, of its model's options.
        say: tells the operator a line.
    """

    def __init__(
        self,
        options: ServeOptions,
        models: ModelsOptions,
        command_of: Callable[[ServeOptions], CommandLine],
        tracing: Tracing | None,
        say: Callable[[str], None],
    ) -> None:
        self.options, self._models, self._say = options, models, say
        self.memory = Memory()
        self.bodies = Bodies(options.most_body_bytes)
        self.is_draining = False
        self.brokers: list[Broker] = []
        self.tenants: dict[str, Tenant] = {}
        self.begun = asyncio.Event()
        self._changed = asyncio.Event()
        for name, source in models.sources.items():
            own = replace(options, model=source, served_names=(name,), name_in_log=name)
            tenant = Tenant(name, own, command_of(own), tracing, self.memory, name in models.pinned, self._changed.set)
            tenant.front.on_ready = partial(self._ready, tenant)
            self.tenants[name] = tenant

    # Requests ---------------------------------------------------------------------------------------------------------

    def find(self, model: Any) -> Tenant:
        """The model of a request, by its own name or its adapter's.

        Raises:
            ApiError: it names none, or an adapter of two.
        """
        known = ", ".join(self.tenants)
        if model is None:
            raise bad_request(f"model: expected one of {known}, as this server has several", "model")
        if not isinstance(model, str):
            raise bad_request(f"model: expected a name, one of {known}", "model")
        if model in self.tenants:
            return self.tenants[model]
        with_it = [one for one in self.tenants.values() if one.front.names.adapter(model) is not None]
        if len(with_it) == 1:
            return with_it[0]
        if with_it:
            both = " and ".join(one.name for one in with_it)
            raise bad_request(f"{short_repr(model)} is an adapter of {both}; give them different names", "model")
        message = f"the model {short_repr(model)} does not exist; this server has {known}, and their adapters"
        raise ApiError(404, message, param="model", code="model_not_found")

    def check_adapter_name(self, tenant: Tenant, name: Any) -> None:
        """
        Raises:
            ApiError: requests mean another model by it, or an adapter of another model.
        """
        others = [one for one in self.tenants.values() if one is not tenant]
        if name in self.tenants or any(one.front.names.adapter(name) is not None for one in others):
            raise bad_request(f"lora_name: {short_repr(name)} means another model of this server; take another name")

    def refused(self, error: ApiError, path: str, client: str) -> None:
        """Logs and counts a request that came to no model; the first one's figures have it."""
        request_refused(error, next(iter(self.tenants.values())).front.metrics, path, client)

    # State ------------------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """Name → running, parked, loading or failed."""
        return {name: one.state for name, one in self.tenants.items()}

    def health(self) -> tuple[bool, dict[str, Any]]:
        """True unless no model will be served: an engine that is lost or stuck starts again by itself."""
        states = self.states()
        is_well = any(state != "failed" for state in states.values())
        return is_well, {"state": self._state(), "models": states}

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """True once each model is served or has failed, and one is served."""
        is_up = self.begun.is_set()
        is_ready = is_up and self.health()[0] and not self.is_draining
        return is_ready, {"state": self._state(), "models": self.states()}

    def _state(self) -> str:
        if self.is_draining:
            return "draining"
        return "ready" if self.begun.is_set() else "starting"

    def _look_whether_begun(self) -> None:
        if all(self._has_begun(one) for one in self.tenants.values()):
            self.begun.set()

    @staticmethod
    def _has_begun(tenant: Tenant) -> bool:
        return tenant.front.supervisor.facts is not None or tenant.state == "failed"

    def _ready(self, tenant: Tenant, facts: EngineFacts) -> None:
        tenant.ready(facts.hello.held_bytes)
        hello = facts.hello
        self._say(f"{tenant.name}: {hello.kv_tokens:,} KV tokens, ready in {hello.seconds:.1f} s")
        self._look_whether_begun()

    # Life -------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs all models until `close`.

        Raises:
            EngineFailedError: none of them can be served.
        """
        works: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._share_out()),
            asyncio.gather(*(self._run(one) for one in self.tenants.values())),
        ]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            if works[0].done():
                works[0].result()  # brokers end by a fault of their own alone
            failures = await works[1]
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)  # engines are killed by then
        if all(failures):
            raise EngineFailedError(
                "; ".join(f"{name}: {why}" for name, why in zip(self.tenants, failures, strict=True))
            )

    async def _run(self, tenant: Tenant) -> str | None:
        """Runs a model; returns why it cannot be served."""
        try:
            await tenant.front.supervisor.run()
        except EngineFailedError as error:
            self._say(f"{tenant.name}: failed: {error}")
            self._changed.set()
            self._look_whether_begun()
            return str(error)
        return None

    async def _share_out(self) -> None:
        """Waits for all needs, and then gives memory for as long as it runs."""
        while any(one.needs is None and one.state != "failed" for one in self.tenants.values()):
            self._changed.clear()
            await self._changed.wait()
        devices: dict[str, list[Tenant]] = {}
        for one in self.tenants.values():
            if one.needs is not None and one.state != "failed":  # one may have died while it waited for the others
                devices.setdefault(one.needs.device, []).append(one)
        self.brokers = [
            Broker(name, tenants, self._models.turn_s, self._models.most_awake) for name, tenants in devices.items()
        ]
        async with asyncio.TaskGroup() as brokers:
            for broker in self.brokers:
                brokers.create_task(broker.run())
            while True:
                self._changed.clear()
                for broker in self.brokers:
                    broker.changed()
                await self._changed.wait()

    async def sweep(self) -> None:
        """Ends requests that wait too long, until it is cancelled."""
        await asyncio.gather(*(one.front.sweep() for one in self.tenants.values()))

    async def drain(self) -> None:
        """Takes no more requests; lets those that run end, within the time that they have."""
        self.is_draining = True
        await asyncio.gather(*(one.front.drain() for one in self.tenants.values()))

    def end(self) -> None:
        """Ends the requests that still run."""
        self.is_draining = True
        for one in self.tenants.values():
            one.front.end()

    def close(self) -> None:
        """Ends the engines, and `run`, soon."""
        for one in self.tenants.values():
            one.front.supervisor.close()
