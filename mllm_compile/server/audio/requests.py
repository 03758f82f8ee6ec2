"""A sound as prompts: it is read, cut where it is quiet, and each window goes to the engine by itself.

Reading and making windows takes up to seconds: `Sound.read`, `first_window` and `cut` are for a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.engine.speech.answers import ids_of_prompt, params_of_text
from mllm_compile.engine.speech.cuts import cut
from mllm_compile.engine.speech.doubt import Written
from mllm_compile.engine.speech.methods import speech_of
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.errors import RequestError
from mllm_compile.media.log_mel import LogMel
from mllm_compile.media.samples import read_samples
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.errors import ApiError, bad_request, of_error
from mllm_compile.server.api.interfaces import AnswerPlan
from mllm_compile.server.api.prompts import Prompt
from mllm_compile.server.audio.answers import TranscriptAnswers, WindowAnswers
from mllm_compile.server.audio.fields import AudioFields, SoundFields, Task
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.job import AnswerFormat


@dataclass(frozen=True)
class Speech:
    """How an engine's model transcribes."""

    decoder: DecoderPrompts
    log_mel: LogMel
    tokens: SpeechTokens
    tokenizer: Any

    @classmethod
    def of(cls, facts: EngineFacts) -> Speech:
        """
        Raises:
            ApiError: it does not.
        """
        try:
            return cls(*speech_of(facts.decoder), facts.tokenizer)
        except RequestError as error:
            raise bad_request(f"model: {error}") from None


@dataclass(frozen=True)
class Sound:
    """A request's sound.

    Attributes:
        samples: [N ≥ 1] float32 at the model's rate.
    """

    fields: AudioFields
    task: Task
    speech: Speech
    samples: np.ndarray

    @classmethod
    def read(cls, fields: AudioFields, task: Task, speech: Speech) -> Sound:
        """The sound of a file; what is asked of it is checked first.

        Raises:
            ApiError: it is refused.
        """
        try:
            known = next(iter(speech.tokens.languages), None) if fields.language is None else fields.language
            speech.tokens.beginning(known, task, fields.has_times, [])
            samples = read_samples(fields.file, speech.log_mel.rate)
        except RequestError as error:
            raise of_error(error, "file") from None
        fields.file = b""  # which is not needed any more
        return cls(fields, task, speech, samples)

    @property
    def num_bytes(self) -> int:
        """The memory that it and its windows take, at about the most."""
        log_mel = self.speech.log_mel
        windows = 4 * log_mel.bins * log_mel.frames * (1 + 2 * self.samples.size // log_mel.samples)
        return self.samples.nbytes + 2 * windows

    @property
    def needs_language(self) -> bool:
        """True if the model has to find it."""
        return self.fields.language is None and bool(self.speech.tokens.languages)

    def cut(self, language: str | None) -> Cut:
        """All its windows, cut where it is quiet.

        Args:
            language: None of a model that knows one alone.

        Raises:
            RequestError: the prompt is refused.
        """
        log_mel, fields, tokens = self.speech.log_mel, self.fields, self.speech.tokens
        earlier = ids_of_prompt(self.speech.tokenizer, fields.prompt)
        beginning = tokens.beginning(language, self.task, fields.has_times, earlier)
        parts, rate = cut(self.samples, log_mel.samples, log_mel.rate), log_mel.rate
        places = [(at / rate, (at + part.size) / rate) for at, part in parts]
        return Cut(language, beginning, places, [self.window(part) for _, part in parts])

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.samples.size / self.speech.log_mel.rate

    def window(self, samples: np.ndarray) -> bytes:
        """The window of samples, as the encoder reads it."""
        return self.speech.log_mel.window(samples).tobytes()

    def first_window(self) -> bytes:
        return self.window(self.samples[: self.speech.log_mel.samples])


@dataclass(frozen=True)
class Cut:
    """A sound as windows, each by itself.

    Attributes:
        language: None of a model that knows one alone.
        beginning: ids that each window's answer follows.
        places: begin and end of each, in seconds; windows: as the encoder reads them.
    """

    language: str | None
    beginning: list[int]
    places: list[tuple[float, float]]
    windows: list[bytes]


class _WindowsRequest:
    """The part of an ApiRequest that both kinds share."""

    has_media = False
    is_quick = True  # its prompts are ready

    def __init__(self, sound: Sound, ids: list[int], windows: Sequence[bytes], ignored: list[str]) -> None:
        self.ignored, self.num_prompts = ignored, len(windows)
        self.fields: SoundFields = sound.fields.of_prompts()
        self._sound = sound
        self._prompts = [Prompt(ids, decoder_ids=ids, window=window) for window in windows]


class WindowsRequest(_WindowsRequest):
    """Asks for windows of a sound, for the server itself.

    Args:
        ids: that each answer follows.
        params: of an engine's facts.
        over: takes the answers, or the error.
        request_id: the client's own name of it.
    """

    def __init__(
        self,
        sound: Sound,
        ids: list[int],
        windows: Sequence[bytes],
        params: Callable[[EngineFacts], SamplingParams],
        over: Callable[[list[Written] | ApiError], None],
        request_id: str | None = None,
    ) -> None:
        super().__init__(sound, ids, windows, [])
        self.fields = SoundFields(model=self.fields.model, priority=self.fields.priority, request_id=request_id)
        self._params, self._over = params, over

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        kept, answers = self._sound.num_bytes, WindowAnswers(frozenset(facts.hello.eos_token_ids), self._over)
        return AnswerPlan(self._prompts, self._params(facts), lambda head: answers, kept_bytes=kept, has_text=False)


class StreamRequest(_WindowsRequest):
    """Asks for a sound's text as a stream, by all its windows at the first temperature."""

    def __init__(self, sound: Sound, given: Cut, ignored: list[str]) -> None:
        super().__init__(sound, given.beginning, given.windows, ignored)
        self._cut = given

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        sound, speech, fields = self._sound, self._sound.speech, self._sound.fields

        def answers(head: dict[str, Any]) -> AnswerFormat:
            ends, by = frozenset(facts.hello.eos_token_ids), (speech.tokens, speech.tokenizer)
            return TranscriptAnswers(*by, ends, self._cut.places, self._cut.language, sound.duration, sound.task)

        return AnswerPlan(
            self._prompts,
            params_of_text(fields.temperatures[0], facts.defaults, speech.tokens, fields.has_times),
            answers,
            kept_bytes=sum(2 * len(window) for window in self._cut.windows),
            has_text=False,
        )
