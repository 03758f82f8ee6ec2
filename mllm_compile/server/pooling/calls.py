"""The texts that a server's clients wait for: they go to the engine's process as arrays, and come back as such."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from mllm_compile.engine.pooling.texts import ReadText
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams
from mllm_compile.server.api.errors import ApiError, of_kind
from mllm_compile.server.replies import Replies
from mllm_compile.server.wire.messages import Abort, Command, Pool, Pooled

_MOST = 2048  # requests at once


class PoolingRequests:
    """The requests in the engine; for one event loop.

    Args:
        send: sends a command to the engine.

    Attributes:
        num_texts: in the engine.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self.num_texts = 0
        self._replies = Replies(send, "requests for texts wait", _MOST)

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def is_idle(self) -> bool:
        """True if none is in the engine."""
        return self._replies.is_empty

    async def run(self, texts: Sequence[ReadText], params: PoolingParams, priority: int) -> list[np.ndarray]:
        """The answers to texts; a client that goes takes them back.

        Raises:
            ApiError: the engine refuses or fails them, or is lost, or too many wait.
        """
        made: list[int] = []

        def command(key: int) -> Command:
            made.append(key)
            return pool_command(key, texts, params, priority)

        self.num_texts += len(texts)
        try:
            event: Pooled = await self._replies.ask(command)
        except asyncio.CancelledError:
            for key in made:
                self._replies.forget(key)
                self._send(Abort(key))
            raise
        finally:
            self.num_texts -= len(texts)
        return answers_of(event)

    def over(self, event: Pooled) -> None:
        """Tells the client that waits."""
        self._replies.over(event.key, event if event.error is None else of_kind(event.error_kind, event.error))

    def fail_all(self, error: ApiError) -> None:
        """Tells all of them that the engine is gone."""
        self._replies.fail_all(error)


def pool_command(key: int, texts: Sequence[ReadText], params: PoolingParams, priority: int) -> Pool:
    """Texts as a command."""
    has_kinds = any(text.kinds is not None for text in texts)
    kinds = [np.zeros_like(text.ids) if text.kinds is None else text.kinds for text in texts] if has_kinds else []
    return Pool(
        key,
        lengths=np.array([len(text.ids) for text in texts], np.int32).tobytes(),
        ids=np.concatenate([text.ids for text in texts]).astype(np.int32).tobytes(),
        kinds=np.concatenate(kinds).astype(np.int32).tobytes() if kinds else b"",
        skipped=np.array([text.skipped for text in texts], np.int32).tobytes(),
        params=asdict(params),
        priority=priority,
    )


def texts_of(command: Pool) -> list[PackedText]:
    """The texts of a command."""
    params = PoolingParams(**command.params | {"rules": tuple(command.params["rules"])})
    lengths, skipped = (np.frombuffer(data, np.int32) for data in (command.lengths, command.skipped))
    ends = np.cumsum(lengths)[:-1]
    ids = np.split(np.frombuffer(command.ids, np.int32).astype(np.int64), ends)
    kinds: Sequence[np.ndarray | None] = [None] * len(ids)
    if command.kinds:
        kinds = np.split(np.frombuffer(command.kinds, np.int32).astype(np.int64), ends)
    return [PackedText(*one) for one in zip(ids, [params] * len(ids), kinds, skipped.tolist(), strict=True)]


def answers_of(event: Pooled) -> list[np.ndarray]:
    """The arrays of an event."""
    sizes = [int(np.prod(shape)) for shape in event.shapes]
    parts = np.split(np.frombuffer(event.data, np.float32), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, event.shapes, strict=True)]
