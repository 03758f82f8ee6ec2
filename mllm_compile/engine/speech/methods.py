"""Engine.transcribe: sounds are cut into windows, which are prompts, and the answers put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mllm_compile.engine.outputs import RequestOutput
from mllm_compile.engine.speech.answers import (
    ids_of_prompt,
    params_of_language,
    params_of_text,
    segments_of,
    transcript_of,
)
from mllm_compile.engine.speech.cuts import cut
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.engine.speech.transcripts import Segment, Transcript
from mllm_compile.errors import RequestError
from mllm_compile.media.log_mel import LogMel
from mllm_compile.media.sound import read_samples
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.short_repr import typed_repr

if TYPE_CHECKING:
    from mllm_compile.engine.decoder_prompts import DecoderPrompts


class SpeechMethods:
    """The methods of Engine for speech."""

    decoder: DecoderPrompts | None
    default_params: SamplingParams

    if TYPE_CHECKING:

        def generate(self, prompts: Any, sampling_params: Any = None, *, priority: int = 0) -> list[RequestOutput]: ...

    def transcribe(
        self,
        sounds: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        prompt: str | None = None,
        temperature: float = 0.0,
        priority: int = 0,
    ) -> list[Transcript]:
        """Writes down what is said in sounds; long ones are cut where they are quiet, and all windows run beside each
        other.

        Args:
            sounds: bytes of a WAV file, samples at the model's rate, (samples, rate), or a list of such.
            language: a code such as en; None: the model finds it in each sound.
            task: transcribe, or translate, into English.
            timestamps: the model marks when segments begin and end, in steps of 20 ms.
            prompt: what was said before, or how names are written.
            temperature: 0 takes the likeliest tokens.
            priority: lower is served first.

        Raises:
            RequestError: a sound or an argument is refused, or the model transcribes nothing.
            MllmError: a step failed.
        """
        decoder, log_mel, tokens = speech_of(self.decoder)
        usual = params_of_text(temperature, self.default_params, timestamps)
        speech = _Speech(self, tokens, log_mel, decoder.tokenizer, priority)
        given = list(sounds) if isinstance(sounds, list) else [sounds]
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(f"prompt: expected a text, got {typed_repr(prompt)}")
        samples = [read_samples(one, log_mel.rate) for one in given]
        languages = [language] * len(samples)
        if language is None and tokens.languages:
            languages = speech.languages(samples)
        earlier = ids_of_prompt(speech.tokenizer, prompt)
        beginnings = [tokens.beginning(one, task, timestamps, earlier) for one in languages]
        return [
            transcript_of(segments, one, sound.size / log_mel.rate, task)
            for one, sound, segments in zip(
                languages, samples, speech.segments(samples, beginnings, usual), strict=True
            )
        ]


def speech_of(decoder: DecoderPrompts | None) -> tuple[DecoderPrompts, LogMel, SpeechTokens]:
    """A model's way to transcribe: its decoder's prompts, windows and tokens.

    Raises:
        RequestError: it transcribes nothing.
    """
    if decoder is None or not decoder.source.is_sound:
        raise RequestError("the model reads no sounds, which transcribe needs. Serve a model such as Whisper.")
    if isinstance(decoder.log_mel, str):
        raise RequestError(f"{decoder.log_mel}.")
    return decoder, decoder.log_mel, SpeechTokens.of(decoder.tokenizer, decoder.vocab_size)


@dataclass(frozen=True)
class _Speech:
    engine: SpeechMethods
    tokens: SpeechTokens
    log_mel: LogMel
    tokenizer: Any
    priority: int

    def languages(self, samples: Sequence[np.ndarray]) -> list[str | None]:
        """The likeliest language of each sound's first window."""
        prompts = [self._prompt(one[: self.log_mel.samples], [self.tokens.start]) for one in samples]
        names = {one: name for name, one in self.tokens.languages.items()}
        return [names[output.token_ids[0]] for output in self._answers(prompts, params_of_language(self.tokens))]

    def segments(
        self, samples: Sequence[np.ndarray], beginnings: Sequence[list[int]], params: SamplingParams
    ) -> list[list[Segment]]:
        """The segments of each sound."""
        windows = [cut(one, self.log_mel.samples, self.log_mel.rate) for one in samples]
        prompts = [
            self._prompt(part, beginning)
            for parts, beginning in zip(windows, beginnings, strict=True)
            for _, part in parts
        ]
        outputs = iter(self._answers(prompts, params))
        return [
            [segment for at, part in parts for segment in self._of_window(next(outputs), at, part.size)]
            for parts in windows
        ]

    def _of_window(self, output: RequestOutput, at: int, count: int) -> list[Segment]:
        rate, score = self.log_mel.rate, output.first.cumulative_logprob
        return segments_of(self.tokens, self.tokenizer, output.token_ids, score, at / rate, (at + count) / rate)

    def _answers(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        outputs = self.engine.generate(prompts, params, priority=self.priority)
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise RequestError(failed)
        return outputs

    def _prompt(self, samples: np.ndarray, beginning: list[int]) -> dict[str, Any]:
        sound = {"multi_modal_data": {"audio": (samples, self.log_mel.rate)}}
        return {"encoder_prompt": sound, "decoder_prompt": beginning}
