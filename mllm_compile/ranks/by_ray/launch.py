"""Starts followers as actors of Ray, in a placement group over one node or several; on no step's way.

Ray reserves what they take (placement.py), and they end with the process that started them, as Ray's actors do. Ranks
of the engine's node (actors.py) share memory. Their GPUs are numbered as without Ray: the group reserves one for each,
rank 0's too, and hides none. Those of other nodes (nodes.py) have what Ray gives them.
"""

from __future__ import annotations

from typing import Any

from mllm_compile.errors import ConfigError
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks.by_ray.actors import RayRank
from mllm_compile.ranks.by_ray.nodes import RayNodes
from mllm_compile.ranks.by_ray.placement import Placement, give_back, place
from mllm_compile.store.opened import CompiledRuntime

_started_clusters = 0  # groups that use the Ray that this process has started


class RayLauncher:
    """Starts the followers of one group.

    Attributes:
        nodes: the other nodes on which Ray has placed ranks; None: it has one node.
    """

    def __init__(self, compiled: CompiledRuntime, timeline: Timeline) -> None:
        """Reserves what they take.

        Args:
            timeline: is told of what is slow.

        Raises:
            ConfigError: the config does not go with several nodes.
            DeviceError: Ray has no room for them.
        """
        import ray

        global _started_clusters
        self._ray: Any = ray
        self._is_own = not ray.is_initialized() or _started_clusters > 0
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        _started_clusters += self._is_own
        runtime = compiled.config.runtime
        self._on_gpus, num_ranks = runtime.device != "cpu", runtime.num_ranks
        self._placement: Placement | None = None
        self.nodes: RayNodes | None = None
        try:
            width = num_ranks // runtime.pipeline_parallel_size
            self._placement = place(ray, num_ranks, width, self._on_gpus, timeline.announce)
            if self._placement.num_local < num_ranks:
                _check_over_nodes(compiled, max(self._placement.node_numbers) + 1)
                self.nodes = RayNodes(ray, self._placement, compiled, timeline)
        except BaseException:  # also Ctrl-C
            self.close()
            raise

    def start(self, rank: int) -> RayRank:
        """Starts a rank of this node.

        Raises:
            DeviceError: the actor ended before it was there.
        """
        assert self._placement is not None, "it was placed, or nothing was made"
        return RayRank(self._ray, self._placement, rank, self._on_gpus)

    def close(self) -> None:
        """Gives the reserved room back, and ends the Ray that was started for it."""
        global _started_clusters
        if self.nodes is not None:
            self.nodes.close()
        if self._placement is not None:
            give_back(self._placement.group)
        if self._is_own:
            self._is_own = False
            _started_clusters -= 1
            if _started_clusters == 0:
                self._ray.shutdown()


def _check_over_nodes(compiled: CompiledRuntime, num_nodes: int) -> None:
    """
    Raises:
        ConfigError: a feature is for ranks of one host.
    """
    config = compiled.config
    where, remedy = f"for ranks of one node, and Ray has placed them on {num_nodes}", "a node with room for all ranks"
    if config.lora.of_sounds:
        raise ConfigError(f"the model brings an adapter for its sounds, and adapters are {where}. Give Ray {remedy}.")
    one_host = {
        "runtime.expert_parallel_size": config.runtime.expert_parallel_size > 1,
        "runtime.kv_offloading_size": config.runtime.kv_offloading_size > 0,
        "runtime.enable_dbo": config.runtime.enable_dbo,
        "lora.max_adapters": config.lora.max_adapters > 0,
    }
    for key, is_set in one_host.items():
        if is_set:
            raise ConfigError(f"{key} is set, which is {where}. Leave it out, or give Ray {remedy}.")
