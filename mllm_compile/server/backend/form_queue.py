"""Requests that ask for a form of their answer, on their way to the engine: a form may take seconds to compile.

They are built by a few threads of this queue, so that the thread that takes commands goes on. Those with one form wait
for each other and for no thread; the first of another form gets the next one.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from mllm_compile.errors import MllmError
from mllm_compile.server.wire.messages import Submit

if TYPE_CHECKING:
    from mllm_compile.engine.sequences import Submission

logger = logging.getLogger("mllm_compile.server")

_THREADS = 4
_MOST = 1024  # requests


class TooManyFormsError(MllmError):
    """More requests wait for their forms than are kept; another try may do."""


class FormQueue:
    """The queue; its threads start with the first request.

    Args:
        build: makes a request's submission, or raises the MllmError why not. Called by several threads.
        done: takes what `build` has made or raised, of requests that are still wanted; one call at a time.
        most: requests, those in work too.
    """

    def __init__(
        self,
        build: Callable[[Submit], Submission],
        done: Callable[[Submit, Submission | MllmError], None],
        most: int = _MOST,
    ) -> None:
        self._build = build
        self._done = done
        self._most = most
        self._news = threading.Condition()
        self._wanted: dict[int, tuple[Submit, bytes]] = {}  # with its form, by key, in order; until `done` is called
        self._taken: dict[int, bytes] = {}  # forms of those that a thread builds, by key
        self._threads: list[threading.Thread] = []
        self._is_over = False

    def add(self, command: Submit) -> None:
        """Adds a request.

        Raises:
            TooManyFormsError: the queue is full.
        """
        form = hashlib.sha256(msgspec.msgpack.encode(command.params["structured_outputs"])).digest()
        with self._news:
            if len(self._wanted) >= self._most:
                raise TooManyFormsError(
                    f"{self._most} requests wait until the form of their answer is compiled, and no more may. "
                    "Ask again later."
                )
            self._wanted[command.key] = command, form
            if len(self._threads) < _THREADS:
                self._threads.append(threading.Thread(target=self._work, name="mllm-forms", daemon=True))
                self._threads[-1].start()
            self._news.notify()

    def drop(self, key: int) -> bool:
        """Forgets a request; False if it is not here (any more)."""
        with self._news:
            return self._wanted.pop(key, None) is not None

    def close(self) -> None:
        """Forgets all; `done` is not called any more. A form that compiles is left to its thread."""
        with self._news:
            self._is_over = True
            self._wanted.clear()
            self._news.notify_all()

    def _work(self) -> None:
        while (command := self._next()) is not None:
            result = self._built(command)
            with self._news:
                self._taken.pop(command.key)
                if self._wanted.pop(command.key, None) is not None:
                    self._done(command, result)
                self._news.notify_all()

    def _next(self) -> Submit | None:
        """The first request whose form no thread has in work; None at the end."""
        with self._news:
            while not self._is_over:
                busy = set(self._taken.values())
                for key, (command, form) in self._wanted.items():
                    if form not in busy:  # so no thread has the request itself
                        self._taken[key] = form
                        return command
                self._news.wait()
            return None

    def _built(self, command: Submit) -> Submission | MllmError:
        try:
            return self._build(command)
        except MllmError as error:
            return error
        except Exception as error:
            logger.error("the form of request %s met an internal error", command.request_id, exc_info=error)
            return MllmError("internal error at the form of the answer; the server's log has it")
