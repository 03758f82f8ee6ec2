"""A further host of an engine: starts its ranks, each with a connection to rank 0, and ends with them."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.device import detect_device
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import DeviceError
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks.admission import Hello, introduce, node_secret
from mllm_compile.ranks.launch_local import FollowerProcess
from mllm_compile.ranks.nodes import NODES_S, keep_alive
from mllm_compile.store.opened import CompiledRuntime

_POLL_S = 0.2
_CONNECT_S = 5.0


def hello_of(compiled: CompiledRuntime, rank: int) -> Hello:
    """The version, device and runtime of a rank of this host."""
    runtime, artifact = compiled.config.runtime, compiled.artifact
    program = json.dumps(artifact.program.to_json(), sort_keys=True).encode()
    return Hello(
        node=runtime.node_rank,
        rank=rank,
        num_nodes=runtime.nnodes,
        device=detect_device(runtime.device).name,
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
    with timeline.stage("meet node 0"), ThreadPoolExecutor(count) as pool:  # all are let in together
        address = runtime.master_addr, runtime.master_port
        hellos = [hello_of(compiled, rank) for rank in ranks]
        coming = [pool.submit(_connected, address, deadline, secret, hello) for hello in hellos]
        connections = [one.result() for one in coming]
    processes: list[FollowerProcess] = []
    try:
        folders = [str(compiled.folder), str(compiled.weights_root)]
        for rank, connection in zip(ranks, connections, strict=True):
            with connection:
                processes.append(FollowerProcess(rank, connection, folders))
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


def _connected(address: tuple[str, int], deadline: float, secret: bytes, hello: Hello) -> socket.socket:
    """A connection by which rank 0 has let a rank in."""
    place = f"{address[0]}:{address[1]}"
    while True:
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"node 0 was not at {place} for {NODES_S:.0f} s: {error.strerror or error}. Start it, or look at "
                    "runtime.master_addr and master_port."
                ) from error
            time.sleep(_POLL_S)
    try:
        keep_alive(connection)
        introduce(connection, secret, hello)
    except BaseException:
        connection.close()
        raise
    return connection
