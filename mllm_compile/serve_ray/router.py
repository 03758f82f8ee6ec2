"""The router of the deployment, by the rules of `--replicas`: a prompt goes where its prefix is cached."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ray.serve.request_router import RequestRouter

from mllm_compile.serve_ray.replica import Asked
from mllm_compile.server.replicas.keys import Keys
from mllm_compile.server.replicas.routing import Routing


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is not installed where types are checked
    """Chooses replicas. Ray calls it in the ingress, by its public interface for routers."""

    def initialize_state(self, **given: Any) -> None:
        self._routing = Routing(())
        self._serving: dict[str, ExitStack] = {}  # by request: closed, they count it no more

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The replica that is wanted, then all others by what they have to do."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_name:
            return []
        self._routing.have({*by_name, *(replica_id.unique_id for replica_id in self.curr_replicas)})
        loads = self._routing.loads
        others = sorted(by_name, key=loads.__getitem__)
        asked = None if pending_request is None else next(iter(pending_request.args), None)
        keys = asked.keys if isinstance(asked, Asked) else Keys()
        best = self._routing.choose(by_name, keys.text, keys.session, keys.hint)
        return [[by_name[best]], [by_name[name] for name in others if name != best]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Counts a request."""
        if replica_id.unique_id in self._routing.loads:
            serving = ExitStack()
            serving.enter_context(self._routing.serving(replica_id.unique_id))
            self._serving[pending_request.metadata.internal_request_id] = serving

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Counts it no more."""
        serving = self._serving.pop(internal_request_id, None)
        if serving is not None:
            serving.close()
