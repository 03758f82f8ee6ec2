"""The nodes of Ray that have ranks but the engine's own: their actors, and the files that each node lacks.

Ranks come as with --nnodes (ranks/nodes.py), by a secret of this start, once their node has the runtime and the
weights (node_files.py).
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

from mllm_compile.config.resolution.device import detect_device
from mllm_compile.errors import DeviceError
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks import nodes
from mllm_compile.ranks.by_ray.actors import POLL_S, STARTED_S, Actor
from mllm_compile.ranks.by_ray.node_files import wanted_of
from mllm_compile.ranks.by_ray.placement import Placement
from mllm_compile.ranks.by_ray.worker import file_server_class
from mllm_compile.ranks.node import hello_of
from mllm_compile.ranks.nodes import Nodes, RemoteRank
from mllm_compile.store.opened import CompiledRuntime


class RayNodes(Nodes):
    """Ray's nodes of one group but the engine's, and the actors there."""

    def __init__(self, ray: Any, placement: Placement, compiled: CompiledRuntime, timeline: Timeline) -> None:
        """Listens at this node's address.

        Raises:
            DeviceError: it has no port left.
        """
        numbers, runtime = placement.node_numbers, compiled.config.runtime
        node_of = {rank: number for rank, number in enumerate(numbers) if number > 0}
        secret, device = secrets.token_bytes(32), detect_device(runtime.device).name
        own = hello_of(compiled.artifact, 0, 0, max(numbers) + 1, device)
        super().__init__(ray.util.get_node_ip_address(), 0, node_of, secret, own)
        self._ray, self._placement, self._compiled, self._timeline = ray, placement, compiled, timeline
        self._actors: dict[int, Actor] = {}
        self._files: Any = None

    def wait(self) -> dict[int, RemoteRank]:
        """Starts the ranks of the other nodes, and waits for them.

        Raises:
            DeviceError: a node lacks what they need, runs something else, or they did not all come in time.
        """
        on_gpus = self._compiled.config.runtime.device != "cpu"
        try:
            for rank in self._node_of:
                self._actors[rank] = Actor(self._ray, self._placement, rank, on_gpus)
            with self._timeline.stage("nodes look for files"):
                folders = self._folders()
            for rank, actor in self._actors.items():
                orders = {"address": self.host, "port": self.port, "secret": self._secret, "rank": rank}
                orders |= {"node": self._node_of[rank], "num_nodes": self._own.num_nodes, "on_gpus": on_gpus}
                actor.running = actor.handle.follow.remote(orders, folders[self._node_of[rank]])
            came = super().wait()
        except BaseException:
            self.close()
            raise
        for rank, process in came.items():
            process.reason = self._actors[rank].reason
        return came

    def _folders(self) -> dict[int, list[str]]:
        """The folders of the runtime and of its weights, by node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._all_end([(actor, actor.looked) for actor in self._actors.values()], STARTED_S)
        wanted, paths = wanted_of(self._compiled)
        here = NodeAffinitySchedulingStrategy(self._placement.nodes[0], soft=False)
        self._files = self._ray.remote(file_server_class()).options(num_cpus=0, scheduling_strategy=here).remote(paths)
        first = {self._node_of[rank]: actor for rank, actor in reversed(self._actors.items())}
        taken = {node: actor.handle.take_files.remote(wanted.to_json(), self._files) for node, actor in first.items()}
        for node, actor in first.items():
            actor.running = taken[node]
        self._all_end([(first[node], call) for node, call in taken.items()], None)
        self._ray.kill(self._files)
        return {node: self._ray.get(call) for node, call in taken.items()}

    def _all_end(self, calls: list[tuple[Actor, Any]], within_s: float | None) -> None:
        """Waits until calls of actors have ended well; those that fetch files end, as each part has its time.

        Raises:
            DeviceError: one has not.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        left = list(calls)
        while left:
            for actor, call in [one for one in left if self._ray.wait([one[1]], timeout=POLL_S)[0]]:
                left.remove((actor, call))
                try:
                    self._ray.get(call)
                except Exception as error:
                    actor.running = call
                    raise DeviceError(f"rank {actor.rank} on {self._name(actor.rank)} {actor.reason()}") from error
            if left and deadline is not None and time.monotonic() > deadline:
                raise DeviceError(
                    f"rank {left[0][0].rank} on {self._name(left[0][0].rank)} was not there after {within_s:.0f} s. "
                    "Look at Ray's logs."
                )

    def _name(self, rank: int) -> str:
        """The node of a rank, as people know it."""
        wanted = self._placement.nodes[rank]
        address = next((one["NodeManagerAddress"] for one in self._ray.nodes() if one["NodeID"] == wanted), wanted)
        return f"node {self._node_of[rank]} ({address})"

    def _check(self) -> None:
        super()._check()
        for rank, actor in self._actors.items():
            if rank not in self._came and actor.has_ended():
                super()._check()  # it was refused, and has ended so
                raise DeviceError(f"rank {rank} on {self._name(rank)} {actor.reason()}")

    def _lacking(self, ranks: set[int]) -> str:
        rank = min(ranks)
        return (
            f"rank {rank} on {self._name(rank)} did not come to {self.host}:{self.port} within {nodes.NODES_S:.0f} s. "
            "Look whether that address is reached from there."
        )

    def close(self) -> None:
        """Ends the actors, and listens no more."""
        super().close()
        for actor in self._actors.values():
            actor.kill()
        if self._files is not None:
            with suppress(Exception):  # of a Ray that has ended
                self._ray.kill(self._files)
