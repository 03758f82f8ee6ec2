"""Loads and unloads of adapters that a server's clients wait for."""

from __future__ import annotations

from collections.abc import Callable

from mllm_compile.server.api.errors import ApiError, of_kind
from mllm_compile.server.replies import Replies
from mllm_compile.server.wire.messages import AdaptersChanged, Command, LoadAdapter, UnloadAdapter


class AdapterChanges:
    """The changes that an engine was asked for; for one event loop.

    Args:
        send: sends a command to the engine.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._replies = Replies(send, "adapters are being loaded")

    @property
    def is_idle(self) -> bool:
        """True if none is in the engine."""
        return self._replies.is_empty

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """
        Raises:
            ApiError: the engine refuses it, or is lost.
        """
        await self._replies.ask(lambda key: LoadAdapter(key, name, path, replace))

    async def unload(self, name: str) -> None:
        """
        Raises:
            ApiError: the engine refuses it, or is lost.
        """
        await self._replies.ask(lambda key: UnloadAdapter(key, name))

    def over(self, event: AdaptersChanged) -> None:
        """Tells the client that waits for a change."""
        self._replies.over(event.key, None if event.error is None else _refused(event.error_kind, event.error))

    def fail_all(self, error: ApiError) -> None:
        """Tells all of them that the engine is gone."""
        self._replies.fail_all(error)


def _refused(kind: str, message: str) -> ApiError:
    """The error of a change: what the adapter, its name or its folder is refused for is the client's."""
    if kind == "AdapterNotFoundError":  # as vLLM has it: trainers ask again, as another machine's files may be late
        return ApiError(404, message, param="lora_path")
    if kind in ("RequestError", "CheckpointError", "UnsupportedModelError"):
        return ApiError(400, message, param="lora_name" if kind == "RequestError" else "lora_path")
    return of_kind(kind, message)
