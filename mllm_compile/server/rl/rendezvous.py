"""Hosts that the engine may join, and folders that it may read, by the server's options."""

from __future__ import annotations

import os

from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.front import Front
from mllm_compile.server.options import ServeOptions
from mllm_compile.transfer.hosts import is_local

_MOST_OF_PATH = 4096  # characters


async def check_host(front: Front, host: str, backend: str | None = None) -> None:
    """
    Args:
        backend: as the client names it; None: what the device takes.

    Raises:
        ApiError: the host is neither this machine nor one of --rl-host, or the device has no such backend.
    """
    if not (is_local(host) or host in front.options.rl_hosts):
        raise ApiError(
            403, f"the host {host[:100]!r} is not this machine; allow it by --rl-host", code="host_not_allowed"
        )
    own = backend_of(await front.facts(None))
    if backend not in (None, "gloo", own):
        raise bad_request(f"backend: expected gloo{' or nccl' * (own == 'nccl')}, got {backend[:50]!r}", "backend")


def backend_of(facts: EngineFacts) -> str:
    """The backend of groups with trainers, by the engine's device."""
    return "nccl" if facts.hello.device.startswith("cuda") else "gloo"


def check_folder(options: ServeOptions, name: str, path: str) -> str:
    """The folder's real path.

    Raises:
        ApiError: it is not below a folder of --rl-folder.
    """
    if not 1 <= len(path) <= _MOST_OF_PATH or "\0" in path:
        raise bad_request(f"{name}: expected a path of up to {_MOST_OF_PATH} characters", name)
    real = os.path.realpath(path)
    if not any(os.path.commonpath([real, root]) == root for root in map(os.path.realpath, options.rl_folders)):
        raise ApiError(
            403, f"{name}: {path[:200]!r} is below no folder of --rl-folder", param=name, code="folder_not_allowed"
        )
    return real
