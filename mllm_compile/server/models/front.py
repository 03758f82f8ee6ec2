"""The front of a server of several models: theirs by name, and its brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import msgspec

from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.api.fields import members_of
from mllm_compile.server.audio import endpoints as audio
from mllm_compile.server.audio.fields import model_of
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.engine_process import CommandLine
from mllm_compile.server.http import Scope, header
from mllm_compile.server.models.broker import Broker
from mllm_compile.server.models.engines import EnginesFront
from mllm_compile.server.models.tenant import Tenant
from mllm_compile.server.options import ModelsOptions, ServeOptions
from mllm_compile.server.spare import Spare
from mllm_compile.server.telemetry.tracing import Tracing

_MOST_OF_QUERY = 4096  # bytes
_OF_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class ModelsFront(EnginesFront[Tenant]):
    """The models of one server.

    Args:
        options: of the server, and of each model but for its name and source.
        command_of: an engine's command line, of its model's options.
        say: tells the operator a line.
        spare: a process for an engine that is started again.
    """

    kind = "model"

    def __init__(
        self,
        options: ServeOptions,
        models: ModelsOptions,
        command_of: Callable[[ServeOptions], CommandLine],
        tracing: Tracing | None,
        say: Callable[[str], None],
        spare: Spare | None = None,
    ) -> None:
        super().__init__(options, say)
        self._models = models
        self.brokers: list[Broker] = []
        self._changed = asyncio.Event()
        for name, source in models.sources.items():
            own = replace(options, model=source, served_names=(name,), name_in_log=name)
            is_pinned = name in models.pinned
            tenant = Tenant(name, own, command_of(own), tracing, self.memory, is_pinned, self._changed.set, spare)
            tenant.front.on_ready = partial(self._ready, tenant)
            self.engines[name] = tenant

    # Requests ---------------------------------------------------------------------------------------------------------

    def find(self, model: Any) -> Tenant:
        """The model of a request, by its own name or its adapter's.

        Raises:
            ApiError: it names none, or an adapter of two.
        """
        known = ", ".join(self.engines)
        if model is None:
            raise bad_request(f"model: expected one of {known}, as this server has several", "model")
        if not isinstance(model, str):
            raise bad_request(f"model: expected a name, one of {known}", "model")
        if model in self.engines:
            return self.engines[model]
        with_it = [one for one in self.engines.values() if one.front.names.adapter(model) is not None]
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
        others = [one for one in self.engines.values() if one is not tenant]
        if name in self.engines or any(one.front.names.adapter(name) is not None for one in others):
            raise bad_request(f"lora_name: {short_repr(name)} means another model of this server; take another name")

    def engine_of_body(self, scope: Scope, path: str, body: bytes) -> Tenant:
        if path in audio.BODIES:
            return self.find(model_of(header(scope, b"content-type"), body))
        members = members_of(body)
        tenant = self.find(_text_of(members, "model"))
        if path in _OF_ADAPTERS:
            self.check_adapter_name(tenant, _text_of(members, "lora_name"))
        return tenant

    def engine_of_query(self, scope: Scope) -> Tenant:
        query = parse_qs(scope.get("query_string", b"")[:_MOST_OF_QUERY].decode("latin-1"))
        return self.find(query["model"][-1] if "model" in query else None)

    def cards(self) -> list[dict[str, Any]]:
        return [card for one in self.engines.values() for card in _cards(one)]

    def card(self, name: str) -> dict[str, Any]:
        return next(card for card in _cards(self.find(name)) if card["id"] == name)

    # Memory -----------------------------------------------------------------------------------------------------------

    def devices(self) -> dict[str, Any]:
        return {one.name: {"bytes": one.num_bytes, "given_bytes": one.given_bytes} for one in self.brokers}

    def _ready(self, engine: Tenant, facts: EngineFacts) -> None:
        engine.ready(facts.hello.held_bytes)
        super()._ready(engine, facts)

    def _failed(self, engine: Tenant) -> None:
        self._changed.set()

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        return [self._share_out()]

    async def _share_out(self) -> None:
        """Waits for all needs, and then gives memory for as long as it runs."""
        while any(one.needs is None and one.state != "failed" for one in self.engines.values()):
            self._changed.clear()
            await self._changed.wait()
        devices: dict[str, list[Tenant]] = {}
        for one in self.engines.values():
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


def _cards(tenant: Tenant) -> list[dict[str, Any]]:
    return [card | {"state": tenant.state} for card in tenant.front.names.cards()]


def _text_of(members: Mapping[str, msgspec.Raw], name: str) -> Any:
    """A member's value; None: it is not there."""
    try:
        return msgspec.json.decode(members[name], type=str | None) if name in members else None
    except msgspec.MsgspecError:
        raise bad_request(f"{name}: expected a text", name) from None
