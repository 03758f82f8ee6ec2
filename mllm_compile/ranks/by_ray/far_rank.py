"""A rank that Ray has started on another node than rank 0's: connects to rank 0, and follows."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mllm_compile.config.resolution.device import detect_device
from mllm_compile.ranks.follower import serve
from mllm_compile.ranks.node import hello_of, meet_node_0
from mllm_compile.runtime.ranks.sealed import SealedConnection
from mllm_compile.store.artifact import open_artifact

_CONNECT_S = 30.0  # rank 0 listens before it starts actors


@dataclass(frozen=True)
class Orders:
    """Rank 0's words to a rank of another node.

    Attributes:
        address, port: rank 0's.
        secret: of this start alone.
        rank, node: which it is.
        num_nodes: over which the ranks are.
        on_gpus: its device is the GPU that Ray has given it; else the CPU.
    """

    address: str
    port: int
    secret: bytes
    rank: int
    node: int
    num_nodes: int
    on_gpus: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def follow_from_afar(orders: dict[str, Any], folders: list[str]) -> None:
    """Follows until rank 0 says that it is over, or is gone.

    Args:
        orders: as Orders.
        folders: the runtime's here, and that of its weights.

    Raises:
        ArtifactError: the runtime is damaged.
        DeviceError: rank 0 does not let it in.
    """
    told = Orders(**orders)
    device = _own_gpu() if told.on_gpus else "cpu"
    hello = hello_of(open_artifact(Path(folders[0])), told.node, told.rank, told.num_nodes, detect_device(device).name)
    deadline = time.monotonic() + _CONNECT_S
    ((connection, session),) = meet_node_0((told.address, told.port), deadline, told.secret, [hello])
    with connection:
        serve(connection, SealedConnection(connection, session, is_rank_0=False), folders, device)


def _own_gpu() -> str:
    """The GPU that Ray has given this actor, which sees all of its node's: ranks write into each other's memory."""
    import ray

    given = str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"cuda:{given if visible is None else visible.split(',').index(given)}"
