"""Answers of the engine that a server's clients wait for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.wire.messages import Command

_MOST = 64  # at once


class Replies:
    """The commands that wait for an answer, of one kind; for one event loop.

    Args:
        send: sends a command to the engine.
        what: so many of it can wait, for the message.
        most: that can wait.
    """

    def __init__(self, send: Callable[[Command], None], what: str, most: int = _MOST) -> None:
        self._most = most
        self._send = send
        self._what = what
        self._keys = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # those in the engine, whose client may be gone

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """True if none waits."""
        return not self._waiting

    async def ask(self, command_of: Callable[[int], Command], *, ends_others: bool = False) -> Any:
        """The answer to the command that is made of a number.

        Args:
            ends_others: it is sent however many wait, as they may wait for it.

        Raises:
            ApiError: the engine refuses it, or is lost, or too many wait.
        """
        if len(self._waiting) >= self._most and not ends_others:
            raise ApiError(429, f"{self._most} {self._what}. Ask again later.", code="queue_full", retry_after_s=1)
        key = next(self._keys)
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._send(command_of(key))
        return await waiting

    def over(self, key: int, answer: Any) -> None:
        """Tells the client that waits: an answer, or an ApiError."""
        waiting = self._waiting.pop(key, None)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, ApiError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def forget(self, key: int) -> None:
        """A command that was taken back has no answer."""
        self._waiting.pop(key, None)

    def fail_all(self, error: ApiError) -> None:
        """Tells all of them that the engine is gone."""
        for key in list(self._waiting):
            self.over(key, error)
