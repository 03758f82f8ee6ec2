"""AsyncEngine: the same engine for asyncio tasks; servers build on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Self, Unpack

from mllm_compile.engine.answers import StreamBuilder, build_answer
from mllm_compile.engine.core.gate import EngineState
from mllm_compile.engine.engine import Engine
from mllm_compile.engine.outputs import RequestOutput
from mllm_compile.engine.prompts import Message, Prompt
from mllm_compile.engine.sequences import Submission
from mllm_compile.engine.sessions import SessionArg
from mllm_compile.engine.stats import EngineStats
from mllm_compile.engine.streams import AsyncReader, LoopWaker, before_the_end
from mllm_compile.engine.unknown_arguments import unknown_of_a_call, unknown_of_an_engine
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.pages.sessions import SessionState
from mllm_compile.runtime.unknown_names import tells_unknown

if TYPE_CHECKING:
    import torch

    from mllm_compile.config.sources import EngineSource
    from mllm_compile.engine.rollouts.weight_updates import Options, UpdateReport


class AsyncEngine:
    """Serves one model to the tasks of one or several event loops.

    Args:
        engine: a config as Engine takes it, or an Engine, which may be used beside this; `close` closes it too.

    Raises:
        MllmError: as Engine.
    """

    @tells_unknown(unknown_of_an_engine)
    def __init__(self, engine: EngineSource | Engine) -> None:
        self.engine = engine if isinstance(engine, Engine) else Engine(engine)
        self._wakers: dict[asyncio.AbstractEventLoop, LoopWaker] = {}

    @tells_unknown(unknown_of_a_call)
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
        adapter: str | None = None,
        session: SessionArg = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers one prompt piece by piece, each output holding what is new; arguments and errors as Engine.stream.

        Leaving the loop early or cancelling the task aborts the request.

        Args:
            stream: False: one output, the whole answer, which costs less.
        """
        build = self.engine.builder.build_one
        return self._run(
            lambda: build(
                prompt, sampling_params, request_id=request_id, priority=priority, adapter=adapter, session=session
            ),
            stream,
        )

    def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
        adapter: str | None = None,
        session: SessionArg = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like generate, for one conversation; template_options are the chat template's."""
        build = self.engine.builder.build_chat
        return self._run(
            lambda: build(
                messages,
                sampling_params,
                template_options,
                request_id=request_id,
                priority=priority,
                adapter=adapter,
                session=session,
            ),
            stream,
        )

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: str | None = None, **options: Unpack[Options]
    ) -> UpdateReport:
        """Like Engine.update_weights; a task that is cancelled leaves the update to go on."""
        return await asyncio.to_thread(self.engine.update_weights, weights, version=version, **options)

    async def update_weights_from_folder(
        self, path: str | os.PathLike[str], *, version: str | None = None, **options: Unpack[Options]
    ) -> UpdateReport:
        """Like Engine.update_weights_from_folder."""
        return await asyncio.to_thread(self.engine.update_weights_from_folder, path, version=version, **options)

    async def pause(self, mode: str = "abort") -> None:
        """Like Engine.pause."""
        await asyncio.to_thread(self.engine.pause, mode)

    async def resume(self) -> None:
        """Like Engine.resume."""
        await asyncio.to_thread(self.engine.resume)

    @property
    def state(self) -> EngineState:
        """The state: running, pausing, paused, updating, torn or sleeping (docs/rollouts.md)."""
        return self.engine.state

    @property
    def is_paused(self) -> bool:
        """True unless it is running."""
        return self.engine.is_paused

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Like Engine.abort."""
        self.engine.abort(request_id)

    async def stats(self) -> EngineStats:
        """The requests running and waiting, and the speed; see EngineStats."""
        return await asyncio.to_thread(self.engine.stats)

    async def flush_prefix_cache(self, *, retracts: bool = False) -> None:
        """Forgets all cached prefixes."""
        await asyncio.to_thread(self.engine.flush_prefix_cache, retracts=retracts)

    async def session_state(self, session_id: str, cache_salt: str | None = None) -> SessionState | None:
        """Like Engine.session_state."""
        return await asyncio.to_thread(self.engine.session_state, session_id, cache_salt)

    async def end_session(self, session_id: str, cache_salt: str | None = None) -> bool:
        """Like Engine.end_session."""
        return await asyncio.to_thread(self.engine.end_session, session_id, cache_salt)

    async def sleep(
        self, level: int = 1, mode: str = "abort", tags: Collection[str] | None = None, *, refuses: bool = False
    ) -> None:
        """Like Engine.sleep."""
        await asyncio.to_thread(self.engine.sleep, level, mode, tags, refuses=refuses)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Like Engine.wake_up."""
        await asyncio.to_thread(self.engine.wake_up, tags)

    async def is_sleeping(self) -> bool:
        """True until all is awake."""
        return self.engine.is_sleeping

    @property
    def is_alive(self) -> bool:
        """True if it takes further requests."""
        return self.engine.is_alive

    async def close(self) -> None:
        """Aborts all requests and gives all memory back. May be called again."""
        # Shielded: a second Ctrl-C cancels this, and would cancel a call that no thread has taken up yet.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.engine.close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _run(self, build: Callable[[], Submission], stream: bool) -> AsyncGenerator[RequestOutput, None]:
        # In a thread: tokenizing a long prompt would hold up every other task.
        submission = await asyncio.to_thread(build)
        core = self.engine.core

        def withdraw() -> None:
            core.withdraw([submission])

        reader = AsyncReader(self._waker(), len(submission.sequences), withdraw)
        submission.sink = reader
        submission.is_stream = stream
        builder = StreamBuilder(submission, self.engine.tokenizer) if stream else None
        has_ended = False
        try:
            core.submit([submission])
            if builder is not None:
                while not has_ended:
                    deltas, has_ended = await reader.take()
                    if has_ended and submission.failure is not None:
                        if before := before_the_end(deltas):
                            yield builder.build(before, False)
                        raise submission.failure.with_traceback(None)
                    yield builder.build(deltas, has_ended)
            else:
                await reader.wait()
                has_ended = True
                answer = build_answer(submission, self.engine.tokenizer)
                if submission.failure is not None:
                    raise submission.failure.with_traceback(None)
                yield answer
        finally:
            if not has_ended:
                withdraw()

    def _waker(self) -> LoopWaker:
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            self._wakers = {other: waker for other, waker in list(self._wakers.items()) if not other.is_closed()}
            waker = self._wakers[loop] = LoopWaker(loop)
        return waker
