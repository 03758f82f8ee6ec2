"""The actors of ranks, as the engine's process sees them; those of its own node get descriptors over a Unix socket."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from mllm_compile.errors import DeviceError
from mllm_compile.process.child_python import module_folders
from mllm_compile.ranks.by_ray.placement import Placement
from mllm_compile.ranks.by_ray.worker import rank_class
from mllm_compile.version import __version__

STARTED_S = 300.0  # an actor imports torch before it connects
POLL_S = 0.05
_SHOWS_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


class Actor:
    """An actor in a placement group."""

    def __init__(self, ray: Any, placement: Placement, rank: int, on_gpus: bool) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self.rank = ray, rank
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": int(on_gpus),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement.group, placement.bundles[rank]),
        }
        if on_gpus:
            options["runtime_env"] = {"env_vars": {_SHOWS_ALL_GPUS: "1"}}
        self.handle = ray.remote(rank_class()).options(**options).remote()
        self.looked = self.handle.look.remote(module_folders(), __version__)
        self.running: Any = self.looked  # its last call

    def has_ended(self) -> bool:
        """True if its last call is over."""
        return bool(self._ray.wait([self.running], timeout=0)[0])

    def reason(self, within_s: float = 1.0) -> str:
        """How its last call, or it itself, ended, for people."""
        try:
            self._ray.get(self.running, timeout=within_s)
        except self._ray.exceptions.GetTimeoutError:
            return "has ended"  # its connection has, and Ray does not know yet
        except Exception as error:  # whatever Ray says of it
            cause = getattr(error, "cause", None)  # of an error in the actor
            lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
            return f"ended: {lines[0] if cause else ' / '.join(lines)}"[:600]
        return "ended"

    def kill(self) -> None:
        """Ends it, and does not wait."""
        with suppress(Exception):  # of a Ray that has ended
            self._ray.kill(self.handle)


class RayRank:
    """One actor on the engine's node."""

    def __init__(self, ray: Any, placement: Placement, rank: int, on_gpus: bool) -> None:
        address = f"mllm-rank-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + address)  # without a name in the file system
            listener.listen(1)
            self._actor = Actor(ray, placement, rank, on_gpus)
            self._actor.running = self._actor.handle.follow_here.remote(address)
            try:
                self.socket = self._accepted(listener)
            except BaseException:
                self._actor.kill()
                raise
        self.pid = _peer(self.socket)[0]

    def _accepted(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(POLL_S)
        deadline = time.monotonic() + STARTED_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                if _peer(connection)[1] == os.getuid():
                    connection.setblocking(True)
                    return connection
                connection.close()
            if self.has_ended():
                raise DeviceError(f"an actor of Ray {self.end_of()} before it was a rank")
        raise DeviceError(f"an actor of Ray was not there after {STARTED_S:.0f} s. Look at Ray's logs.")

    def has_ended(self) -> bool:
        return self._actor.has_ended()

    def end_of(self) -> str:
        return f"{self._actor.reason()}, as Ray says"

    def kill(self) -> None:
        self._actor.kill()

    def close(self) -> None:
        self.kill()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not self.has_ended():
            time.sleep(POLL_S)
        self.socket.close()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
