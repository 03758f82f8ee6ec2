"""The answers of speech: transcripts in OpenAI's forms, streams window by window, and what the server asks itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from mllm_compile.engine.speech.answers import SpeechTokenizer, segments_of, transcript_of
from mllm_compile.engine.speech.doubt import Written
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.engine.speech.transcripts import Segment, Transcript, TranscriptForm
from mllm_compile.server.api.answers import DONE, encode, event
from mllm_compile.server.api.errors import ApiError, openai_refusal
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.dispatcher import ABORTED
from mllm_compile.server.flow.job import JSON, Job
from mllm_compile.server.flow.writer import Headers
from mllm_compile.server.rl.whole import WholeAnswers

_TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
_VTT: Headers = [(b"content-type", b"text/vtt; charset=utf-8")]


def headers_of(form: TranscriptForm) -> Headers:
    """The headers of a transcript in this form."""
    if form in ("json", "verbose_json"):
        return JSON
    return _VTT if form == "vtt" else _TEXT


def whole_transcript(transcript: Transcript, form: TranscriptForm) -> bytes:
    """The body of an answer."""
    shown = transcript.as_form(form)
    if isinstance(shown, str):
        return shown.encode()
    return encode(shown | {"usage": {"type": "duration", "seconds": math.ceil(transcript.duration)}})


class TranscriptAnswers:
    """The stream of a sound's text, whose windows are the completions.

    Args:
        ends: tokens that end an answer.
        places: begin and end of each window, in seconds.
        language: None of a model that knows one alone.
        duration: seconds of the sound.
    """

    def __init__(
        self,
        tokens: SpeechTokens,
        tokenizer: SpeechTokenizer,
        ends: Collection[int],
        places: Sequence[tuple[float, float]],
        language: str | None,
        duration: float,
        task: str,
    ) -> None:
        self._tokens, self._tokenizer, self._ends = tokens, tokenizer, ends
        self._places, self._language, self._duration, self._task = places, language, duration, task
        self._segments: list[Segment] = []
        self._num_read = 0  # windows whose segments are there
        self._told = ""

    def begin(self, job: Job) -> bytes:
        return b""

    def chunk(self, job: Job, choice: Choice) -> bytes:
        self._read(job)
        text = self._transcript().text
        delta, self._told = text[len(self._told) :], text
        return event({"type": "transcript.text.delta", "delta": delta}) if delta else b""

    def tail(self, job: Job) -> bytes:
        rest = self.chunk(job, job.choices[-1])
        num_in, num_out = job.num_prompt_tokens, job.num_output_tokens
        usage = {"type": "tokens", "input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out}
        return rest + event({"type": "transcript.text.done", "text": self._told, "usage": usage}) + DONE

    def whole(self, job: Job) -> bytes:
        raise AssertionError("a whole transcript is asked for window by window")

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body + b"\n\n" + DONE

    def refusal(self, error: ApiError) -> bytes:
        return openai_refusal(error)

    def _read(self, job: Job) -> None:
        """Reads the windows that have ended, as far as all before them have."""
        while self._num_read < len(job.choices) and job.choices[self._num_read].finish_reason is not None:
            choice, (first, last) = job.choices[self._num_read], self._places[self._num_read]
            written = _written(choice, self._ends)
            self._segments += segments_of(self._tokens, self._tokenizer, written, first, last)
            self._num_read += 1

    def _transcript(self) -> Transcript:
        return transcript_of(self._segments, self._language, self._duration, self._task)


class WindowAnswers(WholeAnswers):
    """The answers to windows, which the server itself has asked for.

    Args:
        ends: tokens that end an answer.
        over: takes an answer of each window, or the error.
    """

    def __init__(self, ends: Collection[int], over: Callable[[list[Written] | ApiError], None]) -> None:
        self._ends, self._over = ends, over

    def whole(self, job: Job) -> bytes:
        if any(choice.finish_reason not in ("stop", "length") for choice in job.choices):
            self._over(ApiError(503, "the server has ended the request", code=ABORTED))
        else:
            self._over([_written(choice, self._ends) for choice in job.choices])
        return b""

    def refusal(self, error: ApiError) -> bytes:
        self._over(error)
        return b""


def _written(choice: Choice, ends: Collection[int]) -> Written:
    logprob = sum(one.logprob for one in choice.scores) if choice.scores else None
    return Written.of(choice.token_ids, ends, logprob)
