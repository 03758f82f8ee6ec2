"""The front of a server of several engines of one model: each request's engine, and the model that all have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from mllm_compile.server.api.errors import not_ready
from mllm_compile.server.client_sessions import own_name
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.engine_process import CommandLine
from mllm_compile.server.front import Front
from mllm_compile.server.http import Scope, header
from mllm_compile.server.models.engines import EnginesFront, ServedEngine
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.replicas.keys import keys_of
from mllm_compile.server.replicas.routing import Routing
from mllm_compile.server.spare import Spare
from mllm_compile.server.supervisor import READY
from mllm_compile.server.telemetry.tracing import Tracing


class ReplicasFront(EnginesFront[ServedEngine]):
    """The engines of one server, of one model.

    Args:
        options: of the server, and of each engine but for its devices.
        devices: of each engine, as CUDA_VISIBLE_DEVICES names them; None: those that this process sees.
        command_of: an engine's command line, of its options.
        say: tells the operator a line.
        spare: a process for an engine that is started again.
    """

    kind = "engine"

    def __init__(
        self,
        options: ServeOptions,
        devices: tuple[str | None, ...],
        command_of: Callable[[ServeOptions], CommandLine],
        tracing: Tracing | None,
        say: Callable[[str], None],
        spare: Spare | None = None,
    ) -> None:
        super().__init__(options, say)
        for number, its_devices in enumerate(devices):
            own = replace(options, name_in_log=f"replica {number}", devices=its_devices)
            front = Front(own, command_of(own), tracing, memory=self.memory, spare=spare)
            engine = ServedEngine(str(number), front)
            front.on_ready = partial(self._ready, engine)
            self.engines[engine.name] = engine
        self.routing = Routing(list(self.engines))

    def _ready(self, engine: ServedEngine, facts: EngineFacts) -> None:
        runtime = facts.hello.config.get("runtime", {})
        self.routing.started(engine.name, facts.hello.kv_tokens, bool(runtime.get("kv_offloading_size")))
        super()._ready(engine, facts)

    # Requests ---------------------------------------------------------------------------------------------------------

    def _usable(self) -> list[str]:
        """The engines that take requests now; else those that will, and else all, which say why not."""
        all_of = self.engines.items()
        now = [name for name, one in all_of if _takes_requests(one.front)]
        return now or [name for name, one in all_of if one.state != "failed"] or list(self.engines)

    def engine_of_body(self, scope: Scope, path: str, body: bytes) -> ServedEngine:
        keys = keys_of(path, body, header(scope, b"x-session-id"))
        names = (None if name is None else self._own_name(scope, name) for name in (keys.session, keys.hint))
        return self.engines[self.routing.choose(self._usable(), keys.text, *names)]

    def engine_of_query(self, scope: Scope) -> ServedEngine:
        """The engine of the session that the path names, or any."""
        name = scope["path_params"].get("name")
        home = None if name is None else self.routing.home_of(self._own_name(scope, name))
        return self.engines[home or self._usable()[0]]

    def _own_name(self, scope: Scope, session: str) -> str:
        return own_name(self.first.front.owner_of(scope), session)

    def serving(self, engine: ServedEngine) -> AbstractContextManager[None]:
        return self.routing.serving(engine.name)

    # The model --------------------------------------------------------------------------------------------------------

    def cards(self) -> list[dict[str, Any]]:
        names = self.engines[self._usable()[0]].front.names
        if names.first is None:
            raise not_ready("the engines start; their model's name is not known yet", "starting")
        return names.cards()

    def card(self, name: str) -> dict[str, Any]:
        self.engines[self._usable()[0]].front.names.check(name)
        return next(card for card in self.cards() if card["id"] == name)

    def devices(self) -> dict[str, Any]:
        return {name: one.front.options.devices for name, one in self.engines.items()}

    # State ------------------------------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """True while an engine takes requests."""
        _, state = super().readiness()
        takes = any(_takes_requests(one.front) for one in self.engines.values())
        return takes and not self.is_draining, state


def _takes_requests(front: Front) -> bool:
    return front.supervisor.state == READY and front.supervisor.stuck_for() is None
