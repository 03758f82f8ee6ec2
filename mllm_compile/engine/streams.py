"""The waiting sides of the engine's thread: a call with many prompts, a stream in a thread, one in an event loop.

Each is a Sink (sequences.py): its `on_` methods run on the engine's thread and only leave a note.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from mllm_compile.engine.answers import StreamBuilder
from mllm_compile.engine.outputs import RequestOutput
from mllm_compile.engine.sequences import Delta, Submission
from mllm_compile.process.progress import reporter_for
from mllm_compile.text.detokenizer import Decoder

# Work that is over before this shows no bar.
_BAR_AFTER_S = 1.0
_BAR_INTERVAL_S = 0.1

# A caller that waits for an answer sleeps no longer than a nap at a time, until so much time has passed: then it sleeps
# until it is woken.
_NAP_S, _NAPPING_S = 1e-4, 0.1
# The first one is longer: meanwhile the engine's thread launches the step, which waits for Python's lock behind a nap.
_FIRST_NAP_S = 1e-3
_napping = threading.Lock()  # by one caller at a time: naps take the engine's thread a few µs each


class Countdown:
    """Waits for a number of submissions, and wakes once."""

    def __init__(self, submissions: Iterable[Submission]) -> None:
        self._running = set(submissions)  # the engine's thread takes them out
        # Held until all have ended. Of what threads wait for, this takes the least to make and to wake by.
        self._all_ended = threading.Lock()
        if self._running:
            self._all_ended.acquire()

    @property
    def remaining(self) -> int:
        return len(self._running)

    def on_delta(self, submission: Submission, delta: Delta) -> None:
        raise RuntimeError("internal error: an answer that is wanted whole came as a stream")

    def on_end(self, submission: Submission) -> None:
        if submission in self._running:
            self._running.remove(submission)
            if not self._running:
                self._all_ended.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once all have ended."""
        if not self._running:
            return True
        has_ended = self._all_ended.acquire(timeout=-1 if timeout_s is None else timeout_s)
        if has_ended:
            self._all_ended.release()
        return has_ended

    def wait_in_naps(self) -> bool:
        """Waits a little, for answers that come soon; True if all have ended.

        A processor that has slept for milliseconds takes 0.1 to 0.2 ms to wake, and less than half of that behind a
        nap.
        """
        if not _napping.acquire(blocking=False):
            return not self._running
        try:
            end = time.monotonic() + _NAPPING_S
            if self.wait(_FIRST_NAP_S):
                return True
            while not self.wait(_NAP_S):
                if time.monotonic() >= end:
                    return False
            return True
        finally:
            _napping.release()


def wait_for_all(countdown: Countdown, total: int, progress: bool | None) -> None:
    """Waits for all answers, with a bar over the number of answered prompts if it takes long.

    Args:
        progress: show the bar; None: on a terminal only.
    """
    is_shown = sys.stderr.isatty() if progress is None else progress
    if not is_shown:
        if not countdown.wait_in_naps():
            countdown.wait()
    elif not countdown.wait(_BAR_AFTER_S):
        # It has taken long already: shown at once.
        with reporter_for(plain_lines=True, details=True).stage("generate", total=total) as stage:
            shown = 0
            while shown < total:
                countdown.wait(_BAR_INTERVAL_S)
                done = total - countdown.remaining
                stage.advance(done - shown)
                shown = done


class StreamQueue:
    """The news of a stream. Apart from TokenStream, so that the engine does not keep an abandoned one alive."""

    def __init__(self, num_completions: int) -> None:
        self._num_running = num_completions  # as far as the reader has come
        self._deltas: SimpleQueue[Delta | None] = SimpleQueue()

    def on_delta(self, submission: Submission, delta: Delta) -> None:
        self._deltas.put(delta)

    def on_end(self, submission: Submission) -> None:
        self._deltas.put(None)  # read where the last delta did not come: the engine has ended

    def take(self) -> tuple[list[Delta], bool]:
        """All news since the last call, and whether they are the last; waits until there are any."""
        news = [self._deltas.get()]
        with suppress(Empty):
            while True:
                news.append(self._deltas.get_nowait())
        deltas = [delta for delta in news if delta is not None]
        self._num_running -= _num_ends(deltas)
        return deltas, self._num_running == 0 or len(deltas) < len(news)


class TokenStream(Iterator[RequestOutput]):
    """Iterator over one prompt's outputs, each with what is new; made by `Engine.stream`.

    Leaving it early (`close`, the end of a `with`, garbage collection) aborts the request. For one thread at a time.

    Args:
        withdraw: ends the request.
        check_process: raises where no news can come.
    """

    def __init__(
        self,
        submission: Submission,
        queue: StreamQueue,
        decoder: Decoder | None,
        withdraw: Callable[[], None],
        check_process: Callable[[], None],
    ) -> None:
        self._is_over = True  # until there is something to read
        self._has_failed = False  # and the failure is told only after earlier tokens
        self._submission = submission
        self._queue = queue
        self._builder = StreamBuilder(submission, decoder)
        self._withdraw = withdraw
        self._check_process = check_process
        self._is_over = False

    @property
    def request_id(self) -> str:
        return self._submission.request_id

    def __next__(self) -> RequestOutput:
        """The next output: all that came since the last one.

        Raises:
            RequestError: the request was refused.
            MllmError: a step failed.
            EngineDeadError: the engine died, or this process is a fork of the engine's.
        """
        if self._has_failed:
            self._has_failed = False
            raise self._failure()
        if self._is_over:
            raise StopIteration
        self._check_process()
        deltas, self._is_over = self._queue.take()
        if self._is_over and self._submission.failure is not None:
            deltas = before_the_end(deltas)
            self._has_failed = bool(deltas)
            if not deltas:
                raise self._failure()
        try:
            return self._builder.build(deltas, self._is_over and not self._has_failed)
        except BaseException:
            self.close()
            raise

    def _failure(self) -> BaseException:
        assert self._submission.failure is not None, "it has failed"
        return self._submission.failure.with_traceback(None)

    def close(self) -> None:
        """Aborts the request unless it is over."""
        if not self._is_over:
            self._is_over = True
            self._withdraw()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LoopWaker:
    """Wakes readers of one asyncio loop, many with one call: the engine's thread makes few calls a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._woken: deque[asyncio.Event] = deque()
        self._is_scheduled = False

    def wake(self, event: asyncio.Event) -> bool:
        """Sets the event soon, from any thread. False: the loop is closed."""
        if self._loop.is_closed():  # perhaps ahead of a call that was scheduled
            return False
        self._woken.append(event)
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._set_events)
            except RuntimeError:
                self._is_scheduled = False
                return False
        return True

    def _set_events(self) -> None:
        self._is_scheduled = False  # first: what is appended from here on gets a call of its own
        while self._woken:
            self._woken.popleft().set()


class AsyncReader:
    """The events of one submission, for an asyncio task to await.

    Args:
        waker: the waker of the task's event loop.
        num_completions: how many completions have to end.
        abandon: called when the event loop is closed and the stream has no reader any more.
    """

    def __init__(self, waker: LoopWaker, num_completions: int, abandon: Callable[[], None]) -> None:
        self._waker = waker
        self._abandon = abandon
        self._num_running = num_completions  # as far as the reader has come
        self._event = asyncio.Event()
        self._deltas: deque[Delta] = deque()
        self._has_ended = False

    def on_delta(self, submission: Submission, delta: Delta) -> None:
        self._deltas.append(delta)
        if not self._waker.wake(self._event):
            self._abandon()

    def on_end(self, submission: Submission) -> None:
        self._has_ended = True
        self._waker.wake(self._event)

    async def take(self) -> tuple[list[Delta], bool]:
        """All news since the last call, and whether they are the last; waits until there are any."""
        while not (self._deltas or self._has_ended):
            await self._event.wait()
            self._event.clear()
        has_ended = self._has_ended  # before the deltas are taken: none comes after it
        deltas = [self._deltas.popleft() for _ in range(len(self._deltas))]
        self._num_running -= _num_ends(deltas)
        return deltas, has_ended or self._num_running == 0

    async def wait(self) -> None:
        """Waits until all completions have ended; for a whole answer, which sends no deltas."""
        while not self._has_ended:
            await self._event.wait()
            self._event.clear()


def before_the_end(deltas: list[Delta]) -> list[Delta]:
    """The news that came before a failure, for a reader that takes both at once."""
    return [delta for delta in deltas if delta.finish_reason is None]


def _num_ends(deltas: list[Delta]) -> int:
    return sum(delta.finish_reason is not None for delta in deltas)
