"""A transcript: a text with its segments, and the forms that OpenAI's interface has for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mllm_compile.engine.speech.doubt import compression_ratio

TranscriptForm = Literal["json", "text", "srt", "vtt", "verbose_json"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcript.

    Attributes:
        start, end: seconds from the sound's beginning.
        avg_logprob: mean log-probability of the tokens of its window.
        temperature: at which its window was written down.
    """

    start: float
    end: float
    text: str
    token_ids: list[int]
    avg_logprob: float | None = None
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Transcript:
    """A sound's text.

    Attributes:
        language: as it was told or found; None of a model that knows one alone.
        duration: seconds of the sound.
        segments: of what the model has marked by times; without times, one for each window.
    """

    text: str
    language: str | None
    duration: float
    task: str
    segments: list[Segment]

    def as_form(self, form: TranscriptForm) -> str | dict[str, Any]:
        """The transcript as OpenAI's `response_format` has it: an object of json and verbose_json, else a text."""
        if form == "text":
            return self.text + "\n"
        if form == "srt":
            blocks = (f"{n}\n{_span(one, ',')}\n{one.text}\n" for n, one in enumerate(self.segments, 1))
            return "\n".join(blocks)
        if form == "vtt":
            return "WEBVTT\n\n" + "\n".join(f"{_span(one, '.')}\n{one.text}\n" for one in self.segments)
        if form == "json":
            return {"text": self.text}
        return {
            "task": self.task,
            "language": self.language or "en",
            "duration": round(self.duration, 2),
            "text": self.text,
            "segments": [_as_object(index, one) for index, one in enumerate(self.segments)],
        }


def _as_object(index: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": index,
        "seek": int(segment.start * 100),
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": segment.token_ids,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": round(compression_ratio(segment.text), 2),
        "temperature": segment.temperature,
    }


def _span(segment: Segment, point: str) -> str:
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}"


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3600000:02}:{whole // 60000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def segments_between(times: Sequence[float | None], first: float, last: float) -> list[tuple[int, int, float, float]]:
    """(first token, end, start, end in seconds) of each stretch of text between tokens that are times.

    The model's times may run backwards, or be left out: a segment then begins where the one before ends, and the last
    one ends with the window.

    Args:
        times: of each token; None of text.
        first, last: of the window.
    """
    found, begin, start = [], None, first
    for place, time in enumerate(times):
        if time is None:
            begin = place if begin is None else begin
            continue
        at = min(max(first + time, start), last)
        if begin is not None:
            found.append((begin, place, start, at))
            begin = None
        start = at
    if begin is not None:
        found.append((begin, len(times), start, last))
    return found
