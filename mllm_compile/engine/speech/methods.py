"""Engine.transcribe: sounds are cut into windows, which are prompts, and the answers put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mllm_compile.engine.outputs import RequestOutput
from mllm_compile.engine.speech.answers import (
    ids_of_prompt,
    params_of_language,
    params_of_silence,
    params_of_text,
    segments_of,
    transcript_of,
)
from mllm_compile.engine.speech.cuts import cut
from mllm_compile.engine.speech.doubt import TEMPERATURES, Round, Written, next_of, rounds_of, temperatures_of
from mllm_compile.engine.speech.sequential import Walk, most_told
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.engine.speech.transcripts import Segment, Transcript
from mllm_compile.errors import RequestError
from mllm_compile.media.log_mel import LogMel
from mllm_compile.media.samples import read_samples
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.short_repr import typed_repr

if TYPE_CHECKING:
    from mllm_compile.engine.decoder_prompts import DecoderPrompts


class SpeechMethods:
    """The methods of Engine for speech."""

    config: Any
    decoder: DecoderPrompts | None
    default_params: SamplingParams
    eos_token_ids: frozenset[int]

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
        temperature: float | Sequence[float] = TEMPERATURES,
        sequential: bool = False,
        condition_on_previous_text: bool = False,
        priority: int = 0,
    ) -> list[Transcript]:
        """Writes down what is said in sounds; long ones are cut where they are quiet, and all windows run beside each
        other, or one after another.

        Args:
            sounds: bytes of a file, samples at the model's rate, (samples, rate), or a list of such.
            language: a code such as en; None: the model finds it in each sound.
            task: transcribe, or translate, into English.
            timestamps: the model marks when segments begin and end, in steps of 20 ms.
            prompt: what was said before, or how names are written.
            temperature: 0 takes the likeliest tokens. Of several the next is for windows whose text is doubted:
                unlikely, or repeating itself. Nothing is written of an unlikely window in which nobody speaks.
            sequential: windows of a sound run one after another, each from the last time that the one before has
                marked, as in Transformers' generate. It implies timestamps.
            condition_on_previous_text: each is told the text so far; of windows one after another alone.
            priority: lower is served first.

        Raises:
            RequestError: a sound or an argument is refused, or the model transcribes nothing.
            MllmError: a step failed.
        """
        decoder, log_mel, tokens = speech_of(self.decoder)
        temperatures, usual = temperatures_of(temperature), self.default_params
        if condition_on_previous_text and not sequential:
            raise RequestError("condition_on_previous_text is of windows one after another. Set sequential=True too.")
        has_times = timestamps or sequential
        params = {one: params_of_text(one, usual, tokens, has_times) for one in temperatures}  # checked here
        speech = _Speech(self, tokens, log_mel, decoder, priority, temperatures, params)
        given = list(sounds) if isinstance(sounds, list) else [sounds]
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(f"prompt: expected a text, got {typed_repr(prompt)}")
        samples = [read_samples(one, log_mel.rate) for one in given]
        languages = [language] * len(samples)
        if language is None and tokens.languages:
            languages = speech.languages(samples)
        earlier = ids_of_prompt(speech.tokenizer, prompt)
        if sequential:
            most = most_told(self.config.runtime.max_model_len) if condition_on_previous_text else 0
            beginnings = [tokens.beginning(one, task, True, earlier) for one in languages]
            if most:  # the prompt is the first of the text so far
                beginnings = [tokens.beginning(one, task, True, []) for one in languages]
            walked = speech.walked(samples, beginnings, earlier, most)
        else:
            beginnings = [tokens.beginning(one, task, timestamps, earlier) for one in languages]
            walked = speech.segments(samples, beginnings)
        return [
            transcript_of(segments, one, sound.size / log_mel.rate, task)
            for one, sound, segments in zip(languages, samples, walked, strict=True)
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
    decoder: DecoderPrompts
    priority: int
    temperatures: Sequence[float]
    params: Mapping[float, SamplingParams]

    @property
    def tokenizer(self) -> Any:
        return self.decoder.tokenizer

    def languages(self, samples: Sequence[np.ndarray]) -> list[str | None]:
        """The likeliest language of each sound's first window."""
        prompts = [self._prompt(one[: self.log_mel.samples], [self.tokens.start]) for one in samples]
        names = {one: name for name, one in self.tokens.languages.items()}
        return [names[output.token_ids[0]] for output in self._answers(prompts, params_of_language(self.tokens))]

    def segments(self, samples: Sequence[np.ndarray], beginnings: Sequence[list[int]]) -> list[list[Segment]]:
        """The segments of each sound."""
        windows = [cut(one, self.log_mel.samples, self.log_mel.rate) for one in samples]
        prompts = [
            self._prompt(part, beginning)
            for parts, beginning in zip(windows, beginnings, strict=True)
            for _, part in parts
        ]
        believed = iter(self._believed(prompts))
        return [
            [segment for at, part in parts for segment in self._of_window(next(believed), at, part.size)]
            for parts in windows
        ]

    def walked(
        self,
        samples: Sequence[np.ndarray],
        beginnings: Sequence[list[int]],
        earlier: list[int],
        most_earlier: int,
    ) -> list[list[Segment]]:
        """The segments of each sound, by windows one after another; sounds run beside each other.

        Args:
            earlier: tokens ahead of the text so far; most_earlier: those of it that a window is told.
        """
        frames = self.log_mel.frames
        walks = [Walk.of(one, self.log_mel, earlier, most_earlier) for one in samples]
        found: list[list[Segment]] = [[] for _ in walks]
        while left := [place for place, walk in enumerate(walks) if not walk.is_at_end]:
            prompts = []
            for place in left:
                source = self.decoder.source_of_window(walks[place].window(frames).ravel())
                prompts.append(self._prompt_of(source, walks[place].beginning(self.tokens, beginnings[place])))
            for place, written in zip(left, self._believed(prompts), strict=True):
                found[place] += walks[place].segments(written, self.tokens, self.tokenizer, frames)
        return found

    def _of_window(self, written: Written | None, at: int, count: int) -> list[Segment]:
        rate = self.log_mel.rate
        ends = at / rate, (at + count) / rate
        return [] if written is None else segments_of(self.tokens, self.tokenizer, written, *ends)

    def _believed(self, prompts: list[dict[str, Any]]) -> list[Written | None]:
        """The answer that is believed of each window, as rounds_of decides."""
        no_speech = self.tokens.no_speech
        rounds = rounds_of(len(prompts), self.temperatures, self._text, no_speech is not None)
        written: list[Written] | None = None
        while True:
            step = next_of(rounds, written)
            if not isinstance(step, Round):
                return step
            places, temperature = step
            asked = [prompts[place] for place in places]
            if temperature is not None:
                written = self._written(asked, self.params[temperature])
            elif no_speech is not None:
                beginnings = (self.tokens.up_to_start(one["decoder_prompt"]) for one in asked)
                asked = [one | {"decoder_prompt": ids} for one, ids in zip(asked, beginnings, strict=True)]
                written = self._written(asked, params_of_silence(no_speech))

    def _written(self, prompts: list[dict[str, Any]], params: SamplingParams) -> list[Written]:
        ends, outputs = self.engine.eos_token_ids, self._answers(prompts, params)
        return [Written.of(one.token_ids, ends, one.first.cumulative_logprob) for one in outputs]

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _answers(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        outputs = self.engine.generate(prompts, params, priority=self.priority)
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise RequestError(failed)
        return outputs

    def _prompt(self, samples: np.ndarray, beginning: list[int]) -> dict[str, Any]:
        return self._prompt_of((samples, self.log_mel.rate), beginning)

    def _prompt_of(self, sound: Any, beginning: list[int]) -> dict[str, Any]:
        return {"encoder_prompt": {"multi_modal_data": {"audio": sound}}, "decoder_prompt": beginning}
