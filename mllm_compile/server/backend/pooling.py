"""The engine's side of a server whose model pools: commands become calls, and their answers events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

import numpy as np

from mllm_compile.errors import MllmError, RequestError
from mllm_compile.process.timeline import Timeline
from mllm_compile.server.pooling.calls import texts_of
from mllm_compile.server.wire.messages import (
    Abort,
    AdaptersChanged,
    AskSession,
    Command,
    Control,
    Controlled,
    EngineEvent,
    Hello,
    LoadAdapter,
    Pool,
    Pooled,
    SessionTold,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from mllm_compile.engine.engine import Engine

_OF_GENERATION = (
    "the model pools: pauses, updates of weights and adapters are of models that generate",
    RequestError.__name__,
)


class PoolingCommands:
    """Hands commands to one engine.

    Args:
        tell: sends an event; called by the engine's thread too.
    """

    def __init__(self, engine: Engine, tell: Callable[[EngineEvent], None]) -> None:
        self._core, self._tell = engine.pooling.core, tell
        self._running: dict[int, Future[Any]] = {}

    @property
    def end_error(self) -> MllmError | None:
        """The reason why the engine takes nothing any more."""
        return self._core.end_error

    def take(self, command: Command) -> None:
        """Begins or withdraws a request."""
        if isinstance(command, Abort):
            future = self._running.pop(command.key, None)
            if future is not None:
                future.cancel()
        elif isinstance(command, Pool):
            try:
                future = self._core.submit(texts_of(command), command.priority)
            except MllmError as error:
                self._tell(_failed(command.key, error))
                return
            key = command.key
            self._running[key] = future
            future.add_done_callback(lambda done: self._over(key, done))
        elif isinstance(command, Control):
            self._tell(Controlled(command.key, None, *_OF_GENERATION))
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            self._tell(AdaptersChanged(command.key, [], *_OF_GENERATION))
        elif isinstance(command, AskSession):
            self._tell(SessionTold(command.key, None))

    def _over(self, key: int, future: Future[Any]) -> None:
        self._running.pop(key, None)
        try:
            answers = future.result()
        except CancelledError:
            return
        except MllmError as error:
            self._tell(_failed(key, error))
            return
        data = np.concatenate([answer.ravel() for answer in answers]).astype(np.float32).tobytes()
        self._tell(Pooled(key, [list(answer.shape) for answer in answers], data))


def _failed(key: int, error: MllmError) -> Pooled:
    return Pooled(key, [], b"", str(error), type(error).__name__)


def hello_of(engine: Engine, timeline: Timeline) -> Hello:
    """The first event of an engine that pools."""
    config, folder, calls = engine.config, engine.folder, engine.pooling
    runtime = None if config is None else config.runtime
    return Hello(
        model="" if config is None else config.model.source,
        dtype="" if config is None else config.model.dtype,
        device="" if runtime is None else runtime.device,
        max_model_len=calls.reader.most_tokens,
        max_running_requests=calls.core.most_texts,
        kv_tokens=0,
        page_size=1,
        config={} if config is None else config.model_dump(mode="json", exclude={"cache": True, "model": {"folder"}}),
        vocab_size=engine.vocab_size,
        eos_token_ids=[],
        default_params={},
        tokenizer_files=dict(engine.tokenizer_files),
        why_no_media="the model takes text alone",
        media_domains=[],
        fingerprint="" if folder is None else f"mllm-{folder.name}",
        seconds=timeline.age_s,
        stages=timeline.stages,
        stats=dataclasses.asdict(engine.stats()),
        pooling={"facts": dataclasses.asdict(calls.rules.facts), "has_dense": calls.rules.has_dense},
    )
