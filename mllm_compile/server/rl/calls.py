"""Calls of a server's clients that pause the engine or change its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mllm_compile.server.api.errors import ApiError, not_ready, of_kind
from mllm_compile.server.replies import Replies
from mllm_compile.server.wire.messages import Command, Control, Controlled

_ENDS_WAITS = ("resume", "continue")  # of pauses that wait for requests
_LOST = (
    "the engine was lost, and the one that has started has its first weights, not version {!r}. Send a whole update, "
    "or name these weights by /update_weight_version"
)


class RolloutCalls:
    """The calls of one server; for one event loop.

    Args:
        send: sends a command to the engine.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._replies = Replies(send, "calls wait for the engine")
        self._version: str | None = None  # the last one that was published
        self._lost: str | None = None  # the version that an engine had when it was lost

    async def ask(self, call: str, /, **fields: Any) -> Any:
        """The engine's answer to a call of rl/engine_calls.py.

        Raises:
            ApiError: the engine refuses it, or is lost.
        """
        return await self._replies.ask(lambda key: Control(key, call, fields), ends_others=call in _ENDS_WAITS)

    def over(self, event: Controlled) -> None:
        """Tells the client that waits, if it has not gone; the weights that it has published count either way."""
        if isinstance(event.answer, dict) and "published" in event.answer:
            self._version = event.answer["published"]
            if event.answer.get("is_whole", True):  # a partial update of a lost engine's first weights gives no others
                self._lost = None
        self._replies.over(event.key, event.answer if event.error is None else of_kind(event.error_kind, event.error))

    def engine_lost(self, error: ApiError) -> None:
        """Tells all who wait that the engine is gone, and its weights with it."""
        self._lost = self._lost or self._version
        self._replies.fail_all(error)

    def check_weights(self) -> None:
        """
        Raises:
            ApiError: the engine has not the weights that a client has sent.
        """
        if self._lost is not None:
            raise not_ready(_LOST.format(self._lost), "weights_lost")
