"""A client's request while it runs: its prompts, its completions, and the one response that they go into.

The format (server/api/) says how; the job says when: streams are written as news come, merged where the reader is slow,
other answers when all has ended. Nothing is sent before the first news, so that a refusal is still an error response.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.choice import Choice, PromptRun, TextDecoder
from mllm_compile.server.flow.writer import Headers, Outlet, Writer
from mllm_compile.server.wire.messages import Admitted
from mllm_compile.text.calls.parser import CallParser

logger = logging.getLogger("mllm_compile.server")

EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON: Headers = [(b"content-type", b"application/json")]
_NONE = SamplingParams()
STATUS_GONE = 499  # of nginx: the client has gone; for the log alone


class AnswerFormat(Protocol):
    """The shape of an interface's answers."""

    def begin(self, job: Job) -> bytes:
        """The first events of a stream."""

    def chunk(self, job: Job, choice: Choice) -> bytes:
        """The events of a completion's news; b"" without news."""

    def tail(self, job: Job) -> bytes:
        """The last events of a stream."""

    def whole(self, job: Job) -> bytes:
        """The body of an answer that is no stream."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that has failed."""

    def refusal(self, error: ApiError) -> bytes:
        """The body of an error response."""


class Job:
    """One request.

    Args:
        name: the answer's id.
        format: the shape of its answer.
        outlet: of the ASGI server.
        is_stream: news are sent as they come.
        stream_interval: tokens of a chunk, except the first and the last.
        headers: further ones of the response.
        cancel: tells the engine that these prompts are not wanted any more.
        on_over: called once, at the end.
        form_field: the field that asks for a form of the answer.
        whole_headers: of an answer that is no stream, and no error.

    Attributes:
        scheduled_s, first_token_s, last_token_s: time.monotonic() of the first prompt to get there.
        params: of its prompts.
        num_steps: steps that had a token of it.
        status: of HTTP, once it is over.
    """

    def __init__(
        self,
        name: str,
        format: AnswerFormat,
        outlet: Outlet,
        *,
        is_stream: bool,
        stream_interval: int,
        headers: Headers,
        cancel: Callable[[Job, list[PromptRun]], None],
        on_over: Callable[[Job], None],
        form_field: str | None = None,
        whole_headers: Headers = JSON,
    ) -> None:
        self.name = name
        self.format = format
        self.is_stream = is_stream
        self.form_field = form_field
        self._whole_headers = whole_headers
        self.writer = Writer(outlet, self._free)
        self.prompts: list[PromptRun] = []
        self.choices: list[Choice] = []
        self.arrived_s = time.monotonic()
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.params = _NONE
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_drafted_tokens = self.num_accepted_tokens = 0
        self.status = 200
        self.error: ApiError | None = None
        self.is_over = False
        self.has_left = False  # the client is gone, or was given up
        self.on_left: Callable[[], object] | None = None  # ends the wait for it
        self.last_sent_s = self.arrived_s
        self._stream_interval = stream_interval
        self._headers = headers
        self._cancel = cancel
        self._on_over = on_over
        self._num_open = 0

    def add(
        self,
        prompt: PromptRun,
        params: SamplingParams,
        decoder: TextDecoder | None,
        make_parser: Callable[[], CallParser] | None = None,
    ) -> None:
        """Adds a prompt with its completions, each read by a parser of its own if there are any; before any news."""
        for _ in range(params.n):
            choice = Choice(prompt, len(self.choices), params, decoder, make_parser and make_parser())
            prompt.choices.append(choice)
            self.choices.append(choice)
        self.params = params
        self._num_open += params.n
        self.prompts.append(prompt)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def cached_by_tier(self) -> dict[str, int] | None:
        """The cached tokens by where they were, in SGLang's names; None: all were on the device."""
        host, storage = (
            sum(prompt.num_host_tokens for prompt in self.prompts),
            sum(prompt.num_disk_tokens for prompt in self.prompts),
        )
        if not host + storage:
            return None
        return {"device": self.num_cached_tokens - host - storage, "host": host, "storage": storage}

    @property
    def is_waiting(self) -> bool:
        """True until a prompt of it is admitted."""
        return self.scheduled_s is None

    def timing(self) -> dict[str, float | int]:
        """Where the time went: milliseconds, and counts."""
        now = time.monotonic()
        scheduled = self.scheduled_s or now
        first = self.first_token_s or now
        return {
            "queue": round(1e3 * max(0.0, scheduled - self.arrived_s), 1),
            "prefill": round(1e3 * max(0.0, first - scheduled), 1),
            "decode": round(1e3 * max(0.0, (self.last_token_s or first) - first), 1),
            "steps": self.num_steps,
            "cached": self.num_cached_tokens,
            "preempted": self.num_preemptions,
        }

    def admitted(self, choice: Choice, admitted: Admitted) -> None:
        """Notes that a completion got a row; again after a preemption."""
        prompt = choice.prompt
        if not choice.was_admitted:
            choice.was_admitted = True
            if admitted.index == 0:  # its siblings share its prompt
                prompt.num_cached_tokens = admitted.num_cached_tokens
                prompt.num_host_tokens, prompt.num_disk_tokens = admitted.host_tokens, admitted.disk_tokens
        else:
            self.num_preemptions += 1
        if self.scheduled_s is None:
            self.scheduled_s = admitted.scheduled

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """Counts drafted tokens of a completion."""
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted

    def comment(self, text: str, now: float) -> None:
        """Sends a line of a stream that clients pass over."""
        if not self.writer.has_begun:
            self.begin_stream()
        self.writer.write(b": " + text.encode() + b"\n\n")
        self.last_sent_s = now

    def news(self, choice: Choice) -> None:
        """Sends what a completion has new, or keeps it."""
        if self.is_over or not self.is_stream or self.writer.busy_since is not None or choice.end_is_told:
            return
        if choice.finish_reason is None and choice.has_begun and len(choice.token_ids) < self._stream_interval:
            return
        if not self.writer.has_begun:
            if not choice.token_ids and choice.finish_reason is None:
                return
            self.begin_stream()
        choice.end_is_told = choice.finish_reason is not None
        events = self.format.chunk(self, choice)
        if events:
            self.writer.write(events)
            self.last_sent_s = time.monotonic()

    def begin_stream(self) -> None:
        """Sends the head of a stream."""
        self.writer.begin(200, [*EVENT_STREAM, *self._headers])
        events = self.format.begin(self)
        if events:
            self.writer.write(events)

    def choice_ended(self) -> None:
        """Counts a completion whose last news are sent, or kept; the last one ends the request."""
        self._num_open -= 1
        if not self._num_open:
            self._complete()

    def _complete(self) -> None:
        if self.is_over or (self.is_stream and self.writer.is_busy):  # the latter is ended by `_free`
            return
        if self.is_stream:
            if not self.writer.has_begun:
                self.begin_stream()
            self.writer.write(self.format.tail(self), more=False)
        else:
            timing = ";".join(f"{name}={value:g}" for name, value in self.timing().items())
            told = [*self._whole_headers, (b"x-mllm-timing", timing.encode())]
            self._respond(200, self.format.whole(self), told)
        self._end()

    def _respond(self, status: int, body: bytes, headers: Headers) -> None:
        length = (b"content-length", str(len(body)).encode())
        self.writer.begin(status, [length, *headers, *self._headers])
        self.writer.write(body, more=False)

    def fail(self, error: ApiError) -> None:
        """Ends it with an error: a response, or the last event of a stream."""
        if self.is_over:
            return
        self.error, self.status = error, error.status
        if self.writer.has_begun:
            self.writer.write(self.format.failure(error), more=False)
        else:
            self._respond(error.status, self.format.refusal(error), [*JSON, *error.headers])
        self._end()

    def leave(self) -> None:
        """Ends it without a word: the client has gone, or reads nothing."""
        if self.is_over:
            return
        self.status, self.has_left = STATUS_GONE, True
        self.writer.close()
        if self.on_left is not None:
            self.on_left()
        self._end()

    def _end(self) -> None:
        self.is_over = True
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or "abort"
        self._cancel(self, self.prompts)
        self._on_over(self)
        self.writer.let_go()  # circles would keep long prompts until the collector looks
        for prompt in self.prompts:
            prompt.choices = []

    def _free(self) -> None:
        """Sends what was kept while the reader was slow; runs in the writer's task, where nobody sees an error."""
        try:
            self._send_kept()
        except Exception as error:
            logger.error("request %s met an internal error", self.name, exc_info=error)
            self.fail(ApiError(500, "internal error; the server's log has it", code="internal_error"))

    def _send_kept(self) -> None:
        for choice in self.choices:
            self.news(choice)
            if self.writer.is_busy:
                return
        if not self._num_open:
            self._complete()
