"""A prompt on its way through the engine: its requests, what they have produced, and the sink that waits for it.

A Submission is one prompt; it has `n` Sequences, each with a runtime Request. The engine's thread calls
`Sequence.advance` and `Sequence.end`; the reader's thread does all that it can do instead (detokenizing without stop
strings, log-probability dictionaries, metrics): see answers.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mllm_compile.engine.cache_salt import request_salt
from mllm_compile.engine.core import end_errors
from mllm_compile.engine.outputs import FinishReason
from mllm_compile.errors import MllmError
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.text.detokenizer import Decoder, Detokenizer
from mllm_compile.text.stop_strings import StopMatcher

if TYPE_CHECKING:
    import numpy as np

    from mllm_compile.adapters.registry import Adapter
    from mllm_compile.runtime.media.request import RequestMedia
    from mllm_compile.runtime.sampling.grammar import Grammar
    from mllm_compile.runtime.sampling.params import SamplingParams
    from mllm_compile.runtime.schedule.pages.sessions import SessionTag
    from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, UpdateResult
    from mllm_compile.runtime.sources.request import RequestSource
    from mllm_compile.runtime.step.output import StepOutput, TokenScores


@dataclass(frozen=True, slots=True)
class Delta:
    """The new tokens of one completion of a stream, from one step."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenScores]
    text: str | None  # None: the reader detokenizes
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Sink(Protocol):
    """The side that waits for a submission. Called on the engine's thread: must return at once and not raise."""

    def on_delta(self, submission: Submission, delta: Delta) -> None:
        """Takes the news of a stream."""

    def on_end(self, submission: Submission) -> None:
        """Takes the end of all its completions, or of the engine; a second call changes nothing."""


class StepSink(Protocol):
    """The side that takes the tokens of all requests once a step, as a server does: no request has news of its own.

    Called on the engine's thread: must return at once and not raise.
    """

    def on_step(self, batch: ScheduledBatch, output: StepOutput, result: UpdateResult) -> None:
        """Takes a step's tokens, before the sinks of submissions that end by it are told."""

    def flush(self) -> None:
        """Passes on what was noted, by `on_step` and by the sinks of submissions: the step is over."""


class Submission:
    """One prompt and its completions.

    Args:
        request_id: unique among the requests that the engine holds.
        prompt: its text, None when it was given as token ids.
        prompt_token_ids: the tokens that the model sees.
        params: as the user gave them; each of the `n` completions gets its own seed (`seed + index`).
        eos_token_ids: ids that end a completion.
        priority: lower is served first.
        decoder: the tokenizer, or None (then params ask for no text).
        bad_phrases: the tokens of params.bad_words.
        cache_salt: prompts share KV within one salt only; None: with all that have none.
        grammar: params.structured_outputs, compiled.
        media: the prompt's images.
        prompt_ids: prompt_token_ids as requests have them; None: they are refused.
        adapter: the version of an adapter that answers; None: the model alone.
        session_tag: what it asks of its pages in the prefix cache.
        source: what the encoder of an encoder-decoder reads; prompt_token_ids are its decoder's then.
        source_token_ids: the tokens of that; None: it is another model.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        priority: int,
        decoder: Decoder | None,
        bad_phrases: tuple[tuple[int, ...], ...] = (),
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
        media: RequestMedia | None = None,
        prompt_ids: np.ndarray | None = None,
        adapter: Adapter | None = None,
        session_tag: SessionTag | None = None,
        source: RequestSource | None = None,
        source_token_ids: list[int] | None = None,
    ) -> None:
        self.request_id = request_id
        self.source_token_ids = source_token_ids
        self.adapter = adapter
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.failure: MllmError | None = None  # why it was refused, or the step that it was in failed
        self.sink: Sink | None = None
        self.is_stream = False
        self.sequences = [
            Sequence(
                self,
                index,
                Request(
                    request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                    prompt_token_ids=prompt_token_ids,
                    params=params.of_answer(index),
                    eos_token_ids=eos_token_ids,
                    priority=priority,
                    bad_phrases=bad_phrases,
                    cache_salt=request_salt(cache_salt, adapter),
                    grammar=grammar,
                    media=media,
                    source=source,
                    prompt_ids=prompt_ids,
                    session_tag=session_tag,
                ),
                decoder,
            )
            for index in range(params.n)
        ]
        self.unqueued = deque(self.sequences)  # those that the scheduler does not have yet
        self._num_unfinished = params.n

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    @property
    def shown_token_ids(self) -> list[int]:
        """The ids of the prompt as callers know it: the encoder's, where there is one."""
        return list(self.prompt_token_ids if self.source_token_ids is None else self.source_token_ids)

    @property
    def decoder_token_ids(self) -> list[int] | None:
        """The ids that the decoder of an encoder-decoder began with; None of another model."""
        return None if self.source_token_ids is None else list(self.prompt_token_ids)

    def refuse(self, error: MllmError) -> None:
        """Ends every completion that still runs with "error": the prompt cannot be served, or not to its end."""
        self.failure = error
        for sequence in self.sequences:
            sequence.end("error")

    def engine_ended(self, error: MllmError) -> None:
        """Gives waiting callers `error` after the engine has stopped, unless every completion had ended."""
        if not self.is_finished:
            self.failure = error
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or "error"
        if self.sink is not None:
            self.sink.on_end(self)

    def sequence_ended(self) -> None:
        """Counts a sequence that has ended; the last one tells the sink."""
        self._num_unfinished -= 1
        if not self._num_unfinished and self.sink is not None:
            self.sink.on_end(self)


class Sequence:
    """One completion: a request and, where stop strings watch it, its text so far."""

    __slots__ = (
        "_detokenizer",
        "_stop_matcher",
        "finish_reason",
        "index",
        "num_taken",
        "request",
        "stop_reason",
        "submission",
        "text_parts",
        "versions",
    )

    def __init__(self, submission: Submission, index: int, request: Request, decoder: Decoder | None) -> None:
        params = request.params
        self.submission = submission
        self.index = index
        self.request = request
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.text_parts: list[str] = []  # with stop strings only: all text that was shown
        self.num_taken = 0  # output tokens already looked at
        # From which output token on it has which version of the weights; None: nobody gave them one.
        self.versions: list[tuple[int, str]] | None = None
        self._stop_matcher: StopMatcher | None = None
        self._detokenizer: Detokenizer | None = None
        if params.stop and decoder is not None:
            self._stop_matcher = StopMatcher(tuple(params.stop), params.include_stop_str_in_output)
            self._detokenizer = Detokenizer(decoder, request.prompt_token_ids, params.skip_special_tokens)

    @property
    def has_stop_strings(self) -> bool:
        return self._stop_matcher is not None

    @property
    def is_watched(self) -> bool:
        """True if a reader wants each of its tokens, not only its end."""
        return self.has_stop_strings or self.submission.is_stream

    def advance(self) -> str | None:
        """Takes tokens that the scheduler appended to the request, and perhaps its end.

        Returns:
            The stop string that ends it with its first `num_taken` tokens, when the scheduler does not know that yet.
        """
        request = self.request
        first, self.num_taken = self.num_taken, len(request.output_token_ids)
        is_over = request.finish_reason is not None
        text, matched = self._text_from(first, is_over) if self.has_stop_strings else (None, None)
        is_over = is_over and self.num_taken == len(request.output_token_ids)
        new_ids = request.output_token_ids[first : self.num_taken]
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        elif is_over:
            self._take_reason()
        if self.submission.is_stream:
            self._publish(new_ids, request.output_logprobs[first : self.num_taken], text)
        if self.finish_reason is not None:
            self.submission.sequence_ended()
        return None if is_over else matched

    def end(self, reason: FinishReason | None = None) -> None:
        """Ends the sequence without a new token, or after tokens that had no reader.

        Args:
            reason: "abort" or "error"; None takes the scheduler's.
        """
        if self.finish_reason is not None:
            return
        text = None
        if self._stop_matcher is not None and self._detokenizer is not None and reason != "error":
            try:
                text = self._stop_matcher.push(self._detokenizer.flush())[0] + self._stop_matcher.flush()
                self.text_parts.append(text)
            except Exception as error:  # a fault of the tokenizer
                self.submission.failure, reason = end_errors.no_text(error), "error"
        if reason is None:
            self._take_reason()
        else:
            self.finish_reason = reason
        if self.submission.is_stream:
            self._publish([], [], text)
        self.submission.sequence_ended()

    def _take_reason(self) -> None:
        self.finish_reason = self.request.finish_reason  # type: ignore[assignment]
        self.stop_reason = self.request.stop_reason

    def _text_from(self, first: int, is_over: bool) -> tuple[str, str | None]:
        """Text of the tokens from `first` on that can be shown now, and the stop string that ends it; token by token,
        as a verify step brings several. `num_taken` are those that were looked at."""
        total, texts = self.num_taken, []
        for place in range(first, total):
            self.num_taken = place + 1
            text, matched = self._text_of(place, is_over and self.num_taken == total)
            texts.append(text)
            if matched is not None:
                return "".join(texts), matched
        return "".join(texts), None

    def _text_of(self, place: int, is_last: bool) -> tuple[str, str | None]:
        """Text that can be shown with the token at that place, and the stop string that is complete with it.

        Args:
            is_last: the scheduler has ended the request with it.
        """
        assert self._detokenizer is not None and self._stop_matcher is not None, "only called with stop strings"
        request = self.request
        new_ids = request.output_token_ids[place : place + 1]
        ended_by = (request.finish_reason, request.stop_reason) if is_last else (None, None)
        text = self._detokenizer.push(shown_token_ids(request.params, new_ids, *ended_by))
        if is_last:
            text += self._detokenizer.flush()
        matched = None
        if place + 1 >= request.params.min_tokens:
            text, matched = self._stop_matcher.push(text)
            if is_last and matched is None:
                text += self._stop_matcher.flush()
        if text:
            self.text_parts.append(text)
        return text, matched

    def _publish(self, token_ids: list[int], logprobs: list[TokenScores], text: str | None) -> None:
        sink = self.submission.sink
        if sink is not None:
            delta = Delta(self.index, token_ids, logprobs, text, self.finish_reason, self.stop_reason)
            sink.on_delta(self.submission, delta)


def shown_token_ids(
    params: SamplingParams, token_ids: list[int], finish_reason: str | None, stop_reason: int | str | None
) -> list[int]:
    """The ids that become text: without the token that ended the output, unless it was asked to be shown.

    Args:
        params: the request's.
        token_ids: its whole output, or the last tokens of it.
        finish_reason, stop_reason: as the scheduler or a stop string set them; None while it runs.
    """
    ended_by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
    return token_ids[:-1] if ended_by_token and not params.include_stop_str_in_output else token_ids
