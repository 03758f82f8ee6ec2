"""Starts followers as actors of Ray, in a placement group on this host; on no step's way.

Ray reserves what they take and places them, and they end with the process that started them, as Ray's actors do. Ranks
share memory of this host; an actor gets its descriptors over a Unix socket. GPUs are numbered as without Ray: the group
reserves one for each rank, rank 0's too, and hides none.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

from mllm_compile.errors import ConfigError, DeviceError
from mllm_compile.process.child_python import module_folders

_PLACED_S = 60.0
_STARTED_S = 300.0  # an actor imports torch before it connects
_POLL_S = 0.05
_SHOWS_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"

_started_clusters = 0  # groups that use the Ray that this process has started


class RayLauncher:
    """Starts the followers of one group."""

    def __init__(self, num_ranks: int, on_gpus: bool) -> None:
        """Reserves what they take.

        Raises:
            ConfigError: Ray is not installed.
            DeviceError: this host has no room for them in Ray's eyes.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "runtime.distributed_executor_backend is ray, and Ray is not installed: pip install "
                "'mllm-compile[ray]', or set it to mp, which starts ranks as processes of the engine's."
            )
        import ray
        from ray.util.placement_group import placement_group

        global _started_clusters
        self._ray: Any = ray
        self._on_gpus = on_gpus
        self._is_own = not ray.is_initialized() or _started_clusters > 0
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        _started_clusters += self._is_own
        own = {"CPU": 1.0, self._host_resource(): 0.001} | ({"GPU": 1.0} if on_gpus else {})
        first = {"GPU": 1.0, self._host_resource(): 0.001}
        bundles = [*([first] if on_gpus else []), *[own] * (num_ranks - 1)]
        self._first = len(bundles) - (num_ranks - 1)
        self._group: Any = placement_group(bundles, strategy="STRICT_PACK")
        try:
            if not self._group.wait(_PLACED_S):
                has = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
                raise DeviceError(
                    f"Ray has no room on this host for {num_ranks - 1} ranks beside the engine's: they take {bundles}, "
                    f"and its hosts have {has} left. Start Ray with more, or set a smaller "
                    "runtime.tensor_parallel_size."
                )
        except BaseException:  # also Ctrl-C
            self.close()
            raise

    def _host_resource(self) -> str:
        """The resource that this host alone has."""
        own = self._ray.get_runtime_context().get_node_id()
        resources = next(node["Resources"] for node in self._ray.nodes() if node["NodeID"] == own)
        node: str = next(name for name in resources if name.startswith("node:") and "__" not in name)
        return node

    def start(self, rank: int) -> RayRank:
        """
        Raises:
            DeviceError: the actor ended before it was there.
        """
        return RayRank(self._ray, self._group, self._first + rank - 1, self._on_gpus)

    def close(self) -> None:
        """Gives the reserved room back, and ends the Ray that was started for it."""
        global _started_clusters
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):  # of a Ray that has ended
            remove_placement_group(self._group)
        if self._is_own:
            _started_clusters -= 1
            if _started_clusters == 0:
                self._ray.shutdown()


class RayRank:
    """One actor."""

    def __init__(self, ray: Any, group: Any, bundle: int, on_gpus: bool) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": int(on_gpus),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        }
        if on_gpus:
            options["runtime_env"] = {"env_vars": {_SHOWS_ALL_GPUS: "1"}}
        address = f"mllm-rank-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + address)  # without a name in the file system
            listener.listen(1)
            self._actor = ray.remote(_Follower).options(**options).remote()
            self._running = self._actor.run.remote(address, module_folders())
            try:
                self.socket = self._accepted(listener)
            except BaseException:
                self.kill()
                raise
        self.pid = _peer(self.socket)[0]

    def _accepted(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(_POLL_S)
        deadline = time.monotonic() + _STARTED_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                if _peer(connection)[1] == os.getuid():
                    connection.setblocking(True)
                    return connection
                connection.close()
            if self.has_ended():
                raise DeviceError(f"an actor of Ray {self.end_of()} before it was a rank")
        raise DeviceError(f"an actor of Ray was not there after {_STARTED_S:.0f} s. Look at Ray's logs.")

    def has_ended(self) -> bool:
        return bool(self._ray.wait([self._running], timeout=0)[0])

    def end_of(self) -> str:
        try:
            self._ray.get(self._running, timeout=1)
        except Exception as error:  # whatever Ray says of it
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"ended, as Ray says: {' / '.join(lines)[:600]}"
        return "ended"

    def kill(self) -> None:
        with suppress(Exception):  # of a Ray that has ended
            self._ray.kill(self._actor)

    def close(self) -> None:
        self.kill()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not self.has_ended():
            time.sleep(_POLL_S)
        self.socket.close()


class _Follower:
    """The actor."""

    def run(self, address: str, folders: list[str]) -> None:
        """Follows until rank 0 says that it is over.

        Args:
            address: the Unix socket of rank 0.
            folders: where rank 0 finds its modules, and so the actor, ahead of where Ray would.
        """
        sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
        from mllm_compile.ranks.follower import serve

        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + address)
        serve(connection)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
