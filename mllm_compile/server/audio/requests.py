"""A sound as prompts: it is read, cut where it is quiet, and each window goes to the engine by itself.

Reading and making windows takes up to seconds: `Sound.read`, `first_window` and `TextRequest.of` are for a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.engine.speech.answers import ids_of_prompt, params_of_text
from mllm_compile.engine.speech.cuts import cut
from mllm_compile.engine.speech.methods import speech_of
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.errors import RequestError
from mllm_compile.media.log_mel import LogMel
from mllm_compile.media.sound import read_samples
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.errors import ApiError, bad_request, of_error
from mllm_compile.server.api.interfaces import AnswerPlan
from mllm_compile.server.api.prompts import Prompt
from mllm_compile.server.audio.answers import TranscriptAnswers, WindowAnswer, Written, headers_of
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

    def window(self, samples: np.ndarray) -> bytes:
        """The window of samples, as the encoder reads it."""
        return self.speech.log_mel.window(samples).tobytes()

    def first_window(self) -> bytes:
        return self.window(self.samples[: self.speech.log_mel.samples])


class _WindowsRequest:
    """The part of an ApiRequest that both kinds share."""

    has_media = False
    is_quick = True  # its prompts are ready
    num_prompts = 1

    def __init__(self, sound: Sound, ignored: list[str]) -> None:
        self.ignored = ignored
        self._sound = sound
        self.fields: SoundFields = sound.fields.of_prompts()


class WindowRequest(_WindowsRequest):
    """Asks for one window of a sound, for the server itself.

    Args:
        ids: that the answer follows.
        params: of an engine's facts.
        over: takes the answer, or the error.
        request_id: the client's own name of it.
    """

    def __init__(
        self,
        sound: Sound,
        window: bytes,
        ids: list[int],
        params: Callable[[EngineFacts], SamplingParams],
        over: Callable[[Written | ApiError], None],
        request_id: str | None = None,
    ) -> None:
        super().__init__(sound, [])
        self.fields = SoundFields(model=self.fields.model, priority=self.fields.priority, request_id=request_id)
        self._window, self._ids, self._params, self._over = window, ids, params, over

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        prompt = Prompt(self._ids, decoder_ids=self._ids, window=self._window)
        kept, answer = self._sound.num_bytes, WindowAnswer(frozenset(facts.hello.eos_token_ids), self._over)
        return AnswerPlan([prompt], self._params(facts), lambda head: answer, kept_bytes=kept, has_text=False)


class TextRequest(_WindowsRequest):
    """Asks for a sound's text, by all its windows.

    Args:
        language: None of a model that knows one alone.
        beginning: ids that each window's answer follows.
        windows: (first sample, count, bytes of the window) of each.
    """

    def __init__(
        self,
        sound: Sound,
        ignored: list[str],
        language: str | None,
        beginning: list[int],
        windows: Sequence[tuple[int, int, bytes]],
    ) -> None:
        super().__init__(sound, ignored)
        self.num_prompts = len(windows)
        self._language, self._beginning = language, beginning
        self._windows = windows

    @classmethod
    def of(cls, sound: Sound, ignored: list[str], language: str | None) -> TextRequest:
        """The request of a sound, whose windows are made here.

        Raises:
            RequestError: the prompt is refused.
        """
        log_mel, fields, speech = sound.speech.log_mel, sound.fields, sound.speech
        earlier = ids_of_prompt(speech.tokenizer, fields.prompt)
        beginning = speech.tokens.beginning(language, sound.task, fields.has_times, earlier)
        parts = cut(sound.samples, log_mel.samples, log_mel.rate)
        return cls(sound, ignored, language, beginning, [(at, part.size, sound.window(part)) for at, part in parts])

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        fields, task, speech = self._sound.fields, self._sound.task, self._sound.speech
        ids = self._beginning
        prompts = [Prompt(ids, decoder_ids=ids, window=window) for _, _, window in self._windows]
        rate, language = speech.log_mel.rate, self._language
        places = [(at / rate, (at + count) / rate) for at, count, _ in self._windows]
        duration = self._sound.samples.size / rate

        def answers(head: dict[str, Any]) -> AnswerFormat:
            tokens, tokenizer = speech.tokens, speech.tokenizer
            return TranscriptAnswers(fields.response_format, tokens, tokenizer, places, language, duration, task)

        return AnswerPlan(
            prompts,
            params_of_text(fields.temperature, facts.defaults, speech.tokens, fields.has_times),
            answers,
            kept_bytes=sum(2 * len(window) for _, _, window in self._windows),
            has_text=False,
            whole_headers=headers_of(fields.response_format),
        )
