"""The thread that runs a model that pools: it packs waiting texts of all callers into steps, and answers calls."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mllm_compile.engine.core.end_errors import closed, forked, step_failed, stopped
from mllm_compile.engine.stats import EngineStats, Histogram, RateMeter
from mllm_compile.errors import EngineDeadError, MllmError, RequestError
from mllm_compile.process.no_gc import see_imports
from mllm_compile.runtime.pooling.queue import Call, TextQueue
from mllm_compile.runtime.pooling.texts import PackedText

logger = logging.getLogger("mllm_compile.engine")

Answers = list[np.ndarray]
_CLOSED_POLL_S = 1.0  # how often an idle engine checks whether it was closed
_GLANCE_S = 0.0003  # how often a thread that more texts are promised looks whether its step is over
_MOST_WAITING = 1 << 20  # texts of all callers
_OF_GENERATION = (
    *("kv_pages_used", "kv_pages_cached", "kv_pages_total", "prefix_hit_tokens", "prefix_query_tokens"),
    *("preemptions", "recomputed_tokens", "generated_tokens", "broken_logits"),
)


class BegunStep(Protocol):
    """A step on its way."""

    def is_over(self) -> bool:
        """True if `answers` does not wait."""

    def answers(self) -> Answers:
        """Waits for them, in the order of the texts; called once."""


class Runner(Protocol):
    """Runs steps; mllm_compile.runtime.pooling.runner.PoolingRunner does."""

    @property
    def is_asynchronous(self) -> bool:
        """True if a step that has begun runs beside the thread that began it; False: it is over by then."""

    def launch(self, texts: Sequence[PackedText]) -> BegunStep:
        """Begins a step. The next one may begin before its answers are asked for."""


@dataclass(eq=False)
class _Waiting:
    """The answers of a call that are there, by the numbers of its texts, and how many are not."""

    answers: list[np.ndarray | None]
    missing: int


@dataclass(eq=False)
class _Step:
    """A step that has begun, and what it answers."""

    taken: list[tuple[Call, int]]
    texts: list[PackedText]
    begun: BegunStep

    def is_over(self) -> bool:
        """True if its answers are there, or the device refuses to say, which `answers` tells."""
        try:
            return self.begun.is_over()
        except Exception:
            return True


class PoolingCore:
    """The thread and its queue; `submit` is for any thread.

    Args:
        runner: used by the thread alone.
        queue: likewise, under the lock.
        prepare_thread: called on it before the first step.
        check_device: raises when the device cannot be used any more.
        shutdown: gives the device's memory back; called once.
    """

    def __init__(
        self,
        runner: Runner,
        queue: TextQueue,
        *,
        prepare_thread: Callable[[], None] = lambda: None,
        check_device: Callable[[], None] = lambda: None,
        shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner, self._queue = runner, queue
        self._prepare, self._check_device, self._shutdown = prepare_thread, check_device, shutdown
        lock = threading.RLock()
        self._news, self._begun = threading.Condition(lock), threading.Condition(lock)
        self._waiting = self._readers = 0
        self._answers: dict[Call, _Waiting] = {}
        self._futures: dict[Call, Future[Answers]] = {}
        self._ahead: dict[Future[Answers], int] = {}  # texts of each that no step has begun
        self._is_closing = False
        self._pid = os.getpid()
        self.end_error: EngineDeadError | None = None
        self._rate = RateMeter(time.monotonic())
        self.num_steps = self.num_texts = self.num_tokens = 0
        self._thread = threading.Thread(target=self._run, name="mllm-pooling", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def most_texts(self) -> int:
        """Texts of a step."""
        return self._queue.most_texts

    @property
    def most_tokens(self) -> int:
        """Tokens of a step."""
        return self._queue.most_tokens

    @property
    def num_waiting(self) -> int:
        """Texts that no step has taken."""
        return self._waiting

    @property
    def num_calls(self) -> int:
        """Calls that are not answered."""
        return len(self._futures)

    def _tokens_per_second(self) -> float:
        """Tokens of texts, over the last ten seconds."""
        with self._news:
            return self._rate.rate(time.monotonic())

    def stats(self) -> EngineStats:
        """The figures; an engine that pools has no pages, and no answers token by token."""
        none = Histogram(1e-4, 1e3).snapshot()
        return EngineStats(
            **dict.fromkeys(_OF_GENERATION, 0),  # type: ignore[arg-type]
            running=self.num_calls,
            waiting=self.num_waiting,
            prompt_tokens=self.num_tokens,
            tokens_per_second=0.0,
            prompt_tokens_per_second=self._tokens_per_second(),
            steps=self.num_steps,
            finished={"stop": self.num_texts},
            time_to_first_token=none,
            time_between_tokens=none,
        )

    def submit(self, texts: Sequence[PackedText], priority: int = 0) -> Future[Answers]:
        """The answers to texts, in their order. Cancelling the future withdraws those that no step has taken.

        Raises:
            EngineDeadError: the engine is closed or dead, or this process is a fork of its.
            RequestError: too many texts wait.
        """
        call, future = Call(list(texts), priority), Future[Answers]()
        if os.getpid() != self._pid:
            raise forked()
        with self._news:
            if self.end_error is not None:
                raise self.end_error
            if self._waiting + len(texts) > _MOST_WAITING:
                raise RequestError(f"{self._waiting:,} texts wait; at most {_MOST_WAITING:,} may. Ask again later.")
            self._waiting += len(texts)
            self._answers[call], self._futures[call] = _Waiting([None] * len(texts), len(texts)), future
            self._ahead[future] = len(texts)
            self._queue.add(call)
            self._news.notify()
        return future

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within the context more texts are promised: the thread begins a step of them beside the one that runs."""
        with self._news:
            self._readers += 1
        try:
            yield
        finally:
            with self._news:
                self._readers -= 1
                self._news.notify()

    def give_way(self, future: Future[Answers]) -> None:
        """Waits until steps of all its texts have begun, or it is over: a caller that goes on in Python would keep the
        thread from its next step for as long (the interpreter's lock). So one part of a call waits, and no more."""
        with self._begun:
            self._begun.wait_for(lambda: future not in self._ahead)

    def close(self) -> None:
        """Ends calls that wait, and gives all memory back. May be called again."""
        with self._news:
            self._is_closing = True
            self.end_error = self.end_error or closed()
            self._news.notify()
        if self._thread.ident is not None and os.getpid() == self._pid and threading.current_thread() != self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._prepare()
            begun: _Step | None = None
            while (taken := self._next_step(begun)) is not None:
                following = self._begin(taken) if taken else None  # ahead of the answers: the device is never idle
                if begun is not None:
                    self._end(begun)
                begun = following
                if begun is not None and not self._runner.is_asynchronous:  # else its clients wait for the next one too
                    self._end(begun)
                    begun = None
            if begun is not None:
                self._end(begun)
        except BaseException as fault:
            logger.exception("the engine met an internal error")
            self.end_error = stopped(fault)
        finally:
            self._end_all(self.end_error or closed())
            self._shutdown()

    def _is_without_news(self) -> bool:
        """Waits for texts, a second long."""
        with self._news:
            if self._is_closing or len(self._queue):
                return False
            # Not for ever: a garbage collection right here may close the engine without waking this wait.
            is_idle = not self._news.wait(_CLOSED_POLL_S)
        if is_idle:
            see_imports()
        return True

    def _next_step(self, begun: _Step | None) -> list[tuple[Call, int]] | None:
        """The next texts. Without a step that has begun it waits for some, else at most until that is over, and only
        for those that are promised. None at the end."""
        while begun is None and self._is_without_news():
            pass
        with self._news:
            if begun is not None:
                while self._readers and not (self._is_closing or len(self._queue) or begun.is_over()):
                    self._news.wait(_GLANCE_S)
            if self._is_closing:
                return None
            taken = self._queue.take()
            self._waiting -= len(taken)
        gone = {call for call, _ in taken if self._futures[call].cancelled()}
        kept = [(call, number) for call, number in taken if call not in gone]
        for call in gone:
            self._forget(call)
        return kept

    def _begin(self, taken: list[tuple[Call, int]]) -> _Step | None:
        texts = [call.texts[number] for call, number in taken]
        if not self._runner.is_asynchronous:
            self._say_begun(taken)
        try:
            return _Step(taken, texts, self._runner.launch(texts))
        except Exception as error:
            self._fail_step(taken, error)
            return None
        finally:
            if self._runner.is_asynchronous:
                self._say_begun(taken)

    def _say_begun(self, taken: list[tuple[Call, int]]) -> None:
        with self._begun:
            for call, count in Counter(call for call, _ in taken).items():
                future = self._futures.get(call)
                if future in self._ahead:
                    self._ahead[future] -= count
                    if not self._ahead[future]:
                        del self._ahead[future]
            self._begun.notify_all()

    def _end(self, step: _Step) -> None:
        try:
            answers = step.begun.answers()
        except Exception as error:
            self._fail_step(step.taken, error)
            return
        self.num_steps += 1
        self.num_texts += len(step.texts)
        tokens = sum(len(text.ids) for text in step.texts)
        self.num_tokens += tokens
        with self._news:
            self._rate.add(tokens, time.monotonic())
        are_finite = all(np.isfinite(answer).all() for answer in _whole(answers))
        for (call, number), answer in zip(step.taken, answers, strict=True):
            if are_finite or np.isfinite(answer).all():
                self._take(call, number, answer)
            else:
                self._fail(call, _not_finite())

    def _fail_step(self, taken: list[tuple[Call, int]], error: Exception) -> None:
        self._check_device()
        failure = step_failed(f"{len(taken)} texts", error)
        for call in dict.fromkeys(call for call, _ in taken):
            self._fail(call, failure)

    def _take(self, call: Call, number: int, answer: np.ndarray) -> None:
        kept = self._answers.get(call)
        if kept is None:  # another text of it has failed
            return
        kept.answers[number] = answer
        kept.missing -= 1
        if not kept.missing:
            future, answers = self._forget(call), [one for one in kept.answers if one is not None]
            _settle(lambda: future.set_result(answers))

    def _fail(self, call: Call, error: MllmError) -> None:
        if call in self._futures:
            future = self._forget(call)
            _settle(lambda: future.set_exception(error))

    def _forget(self, call: Call) -> Future[Answers]:
        with self._news:
            self._waiting -= len(call.waiting)
            call.waiting.clear()
            self._answers.pop(call, None)
            future = self._futures.pop(call, None) or Future()
            if self._ahead.pop(future, None) is not None:
                self._begun.notify_all()
            return future

    def _end_all(self, error: EngineDeadError) -> None:
        with self._news:
            self.end_error = error
            calls = list(self._futures)
        for call in calls:
            self._fail(call, error)


def _whole(answers: Answers) -> list[np.ndarray]:
    """The arrays that the answers are rows of, each once."""
    wholes = [answer.base if isinstance(answer.base, np.ndarray) else answer for answer in answers]
    return list({id(whole): whole for whole in wholes}.values())


def _settle(settle: Callable[[], None]) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        settle()


def _not_finite() -> MllmError:
    return MllmError(
        "the model's hidden states of a text hold NaN or inf. Other requests go on. Check that the checkpoint is "
        "whole, and try model.dtype: float32: float16 overflows where bfloat16 and float32 do not."
    )
