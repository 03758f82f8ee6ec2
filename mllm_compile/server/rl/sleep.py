"""Sleep in place over HTTP: vLLM's paths, and SGLang's names for the same.

Requests that come while anything sleeps get 503 with the reason. Every call may come again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mllm_compile.server.api.errors import bad_request
from mllm_compile.server.endpoints import Endpoint
from mllm_compile.server.rl.endpoint import Asked, endpoint

_LEVELS = ("0", "1", "2")
_GRAPHS = "cuda_graph"  # SGLang's tag of what always stays


class MemoryFields(msgspec.Struct, kw_only=True):
    """The fields of SGLang's two paths; no tags mean all."""

    tags: list[str] | None = None


async def sleep(asked: Asked) -> Any:
    level = asked.text("level", "1")
    if level not in _LEVELS:
        raise bad_request(f"level: expected {', '.join(_LEVELS)}, got {level[:50]!r}", "level")
    await _sleep(asked, int(level), asked.text("mode", "abort"), asked.query.get("tags"))
    return {"status": "sleeping"}


async def release_kv_cache(asked: Asked) -> Any:
    await _sleep(asked, 1, asked.text("mode", "abort"), ["kv_cache"])
    return {"status": "sleeping"}


async def wake_up(asked: Asked) -> Any:
    await asked.calls.ask("wake_up", tags=asked.query.get("tags"))
    return {"status": "awake"}


async def is_sleeping(asked: Asked) -> Any:
    return {"is_sleeping": await asked.calls.ask("is_sleeping")}


async def release(asked: Asked) -> Any:
    """SGLang's: requests are computed anew, and weights come back as they are."""
    tags = asked.read(MemoryFields).tags
    if tags is not None and _GRAPHS in tags:
        raise bad_request(
            f"tags: expected weights or kv_cache, got {_GRAPHS!r}: captured graphs stay in memory", "tags"
        )
    await _sleep(asked, 1, "retract", tags)
    return {"success": True, "message": ""}


async def resume(asked: Asked) -> Any:
    tags = asked.read(MemoryFields).tags
    asleep = None if tags is None else [tag for tag in tags if tag != _GRAPHS]
    if asleep is None or asleep:
        await asked.calls.ask("wake_up", tags=asleep)
    return {"success": True, "message": ""}


async def _sleep(asked: Asked, level: int, mode: str, tags: list[str] | None) -> None:
    await asked.calls.ask("sleep", level=level, mode=mode, tags=tags)


BODIES: dict[str, type[msgspec.Struct]] = {
    "/release_memory_occupation": MemoryFields,
    "/resume_memory_occupation": MemoryFields,
}
PATHS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/sleep", endpoint(sleep)),
    ("POST", "/release_kv_cache_memory", endpoint(release_kv_cache)),
    ("POST", "/wake_up", endpoint(wake_up)),
    ("GET", "/is_sleeping", endpoint(is_sleeping)),
    ("POST", "/release_memory_occupation", endpoint(release)),
    ("POST", "/resume_memory_occupation", endpoint(resume)),
)
