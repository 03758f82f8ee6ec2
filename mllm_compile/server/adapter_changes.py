"""Loads and unloads of adapters that a server's clients wait for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from mllm_compile.server.api.errors import ApiError, of_kind
from mllm_compile.server.wire.messages import AdaptersChanged, Command, LoadAdapter, UnloadAdapter

_MOST = 64  # at once


class AdapterChanges:
    """The changes that an engine was asked for; for one event loop.

    Args:
        send: sends a command to the engine.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._keys = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}  # those in the engine, whose client may be gone

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """
        Raises:
            ApiError: the engine refuses it, or is lost.
        """
        key = next(self._keys)
        await self._ask(key, LoadAdapter(key, name, path, replace))

    async def unload(self, name: str) -> None:
        """
        Raises:
            ApiError: the engine refuses it, or is lost.
        """
        key = next(self._keys)
        await self._ask(key, UnloadAdapter(key, name))

    def over(self, event: AdaptersChanged) -> None:
        """Tells the client that waits for a change."""
        waiting = self._waiting.pop(event.key, None)
        if waiting is None or waiting.done():
            return
        if event.error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(_refused(event.error_kind, event.error))

    def fail_all(self, error: ApiError) -> None:
        """Tells all of them that the engine is gone."""
        lost, self._waiting = self._waiting, {}
        for waiting in lost.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _ask(self, key: int, command: Command) -> None:
        if len(self._waiting) >= _MOST:
            message = f"{_MOST} adapters are being loaded. Ask again later."
            raise ApiError(429, message, code="queue_full", retry_after_s=1)
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._send(command)
        await waiting


def _refused(kind: str, message: str) -> ApiError:
    """The error of a change: what the adapter, its name or its folder is refused for is the client's."""
    if kind in ("RequestError", "CheckpointError", "UnsupportedModelError"):
        return ApiError(400, message, param="lora_name" if kind == "RequestError" else "lora_path")
    return of_kind(kind, message)
