"""A further host of an engine: starts its ranks, each with a connection to rank 0, and ends with them."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.resolution.device import detect_device
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import DeviceError
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks.admission import HANDSHAKE_S, Hello, hear, introduce, node_secret
from mllm_compile.ranks.launch_local import FollowerProcess
from mllm_compile.ranks.nodes import NODES_S, keep_alive
from mllm_compile.store.artifact import Artifact

_POLL_S = 0.2
_CONNECT_S = 5.0


def hello_of(artifact: Artifact, node: int, rank: int, num_nodes: int, device: str) -> Hello:
    """The version, device and runtime of a rank of this host.

    Args:
        device: its kind, for people.
    """
    program = json.dumps(artifact.program.to_json(), sort_keys=True).encode()
    return Hello(
        node=node,
        rank=rank,
        num_nodes=num_nodes,
        device=device,
        factors=dict(artifact.factors),
        program=hashlib.sha256(program).hexdigest(),
    )


def run_node(source: EngineConfig | Path, timeline: Timeline) -> None:
    """Runs the ranks of this host until rank 0 ends them.

    Raises:
        ConfigError, ArtifactError, …: as of a start.
        DeviceError: rank 0 did not come, does not let them in, or one of them failed.
    """
    secret = node_secret()
    compiled = open_runtime(source, timeline) if isinstance(source, Path) else load_or_compile(source, timeline)
    runtime = compiled.config.runtime
    count = runtime.num_ranks // runtime.nnodes
    ranks = range(runtime.node_rank * count, (runtime.node_rank + 1) * count)
    deadline = time.monotonic() + NODES_S
    with timeline.stage("meet node 0"):
        facts = runtime.nnodes, detect_device(runtime.device).name
        hellos = [hello_of(compiled.artifact, runtime.node_rank, rank, *facts) for rank in ranks]
        met = meet_node_0((runtime.master_addr, runtime.master_port), deadline, secret, hellos)
    processes: list[FollowerProcess] = []
    try:
        folders = [str(compiled.folder), str(compiled.weights_root)]
        for rank, (connection, session) in zip(ranks, met, strict=True):
            with connection:
                processes.append(FollowerProcess(rank, connection, session, folders))
        timeline.tell(f"node {runtime.node_rank}: {count} ranks follow node 0")
        while not all(process.has_ended() for process in processes):
            failed = [process for process in processes if process.has_ended() and process.code != 0]
            if failed:
                break
            time.sleep(_POLL_S)
        if failed := [process for process in processes if process.has_ended() and process.code != 0]:
            raise DeviceError(f"rank {failed[0].rank} {failed[0].end_of()}")
    finally:
        for process in processes:
            process.close()


def meet_node_0(
    address: tuple[str, int], deadline: float, secret: bytes, hellos: Sequence[Hello]
) -> list[tuple[socket.socket, bytes]]:
    """A connection for each rank of this host, which rank 0 lets in together, and its session's key.

    Args:
        deadline: of the first connection, by the monotonic clock.

    Raises:
        DeviceError: rank 0 is not there, or lets one not in.
    """
    with ExitStack() as opened:
        met: list[tuple[socket.socket, bytes]] = []
        for hello in hellos:
            try:
                connection = opened.enter_context(_connected(address, deadline if not met else 0.0))
                keep_alive(connection)
                met.append((connection, introduce(connection, secret, hello)))
            except DeviceError:
                for told, earlier in zip(hellos, met, strict=False):
                    hear(*earlier, told.rank, HANDSHAKE_S)  # node 0 may have refused that one, and be gone
                raise
        for hello, one in zip(hellos, met, strict=True):
            hear(*one, hello.rank)
        opened.pop_all()
    return met


def _connected(address: tuple[str, int], deadline: float) -> socket.socket:
    place = f"{address[0]}:{address[1]}"
    while True:
        try:
            return socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"node 0 was not at {place} for {NODES_S:.0f} s: {error.strerror or error}. Start it, or look at "
                    "runtime.master_addr and master_port."
                ) from error
            time.sleep(_POLL_S)
