"""Engine.transcribe: sounds are cut into windows, which are prompts, and the answers put together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from mllm_compile.engine.speech.doubt import TEMPERATURES, is_doubted, is_silent, is_unlikely, temperatures_of
from mllm_compile.engine.speech.sequential import Walk, most_told
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
            sounds: bytes of a WAV file, samples at the model's rate, (samples, rate), or a list of such.
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
        params = [params_of_text(one, usual, tokens, has_times) for one in temperatures]
        speech = _Speech(self, tokens, log_mel, decoder, priority)
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
            walked = speech.walked(samples, beginnings, params, earlier, most)
        else:
            beginnings = [tokens.beginning(one, task, timestamps, earlier) for one in languages]
            walked = speech.segments(samples, beginnings, params)
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
class _Answer:
    output: RequestOutput
    temperature: float


def _mean(answer: _Answer | None) -> float | None:
    """The mean log-probability of an answer's tokens."""
    if answer is None or answer.output.first.cumulative_logprob is None or not answer.output.token_ids:
        return None
    return answer.output.first.cumulative_logprob / len(answer.output.token_ids)


@dataclass(frozen=True)
class _Speech:
    engine: SpeechMethods
    tokens: SpeechTokens
    log_mel: LogMel
    decoder: DecoderPrompts
    priority: int

    @property
    def tokenizer(self) -> Any:
        return self.decoder.tokenizer

    def languages(self, samples: Sequence[np.ndarray]) -> list[str | None]:
        """The likeliest language of each sound's first window."""
        prompts = [self._prompt(one[: self.log_mel.samples], [self.tokens.start]) for one in samples]
        names = {one: name for name, one in self.tokens.languages.items()}
        return [names[output.token_ids[0]] for output in self._answers(prompts, params_of_language(self.tokens))]

    def segments(
        self, samples: Sequence[np.ndarray], beginnings: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[list[Segment]]:
        """The segments of each sound; `params` of each temperature that is tried."""
        windows = [cut(one, self.log_mel.samples, self.log_mel.rate) for one in samples]
        prompts = [
            self._prompt(part, beginning)
            for parts, beginning in zip(windows, beginnings, strict=True)
            for _, part in parts
        ]
        outputs = iter(self._believed(prompts, params))
        return [
            [segment for at, part in parts for segment in self._of_window(next(outputs), at, part.size)]
            for parts in windows
        ]

    def walked(
        self,
        samples: Sequence[np.ndarray],
        beginnings: Sequence[list[int]],
        params: Sequence[SamplingParams],
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
            for place, answer in zip(left, self._believed(prompts, params), strict=True):
                if answer is None:
                    walks[place].skip(frames)
                    continue
                ids, by = self._without_end(answer.output), (self.tokens, self.tokenizer)
                found[place] += walks[place].segments(ids, *by, frames, _mean(answer), answer.temperature)
        return found

    def _without_end(self, output: RequestOutput) -> Sequence[int]:
        is_ended = output.finish_reason == "stop" and output.token_ids
        return (
            output.token_ids[:-1]
            if is_ended and output.token_ids[-1] in self.engine.eos_token_ids
            else output.token_ids
        )

    def _of_window(self, answer: _Answer | None, at: int, count: int) -> list[Segment]:
        if answer is None:
            return []
        rate, output = self.log_mel.rate, answer.output
        score, ends = output.first.cumulative_logprob, (at / rate, (at + count) / rate)
        return segments_of(self.tokens, self.tokenizer, output.token_ids, score, *ends, answer.temperature)

    def _believed(self, prompts: list[Any], params: Sequence[SamplingParams]) -> list[_Answer | None]:
        """An answer to each prompt, of the first temperature at which it is not doubted, or of the last; None of
        windows in which nobody speaks."""
        answers: list[_Answer | None] = [None] * len(prompts)
        left = list(range(len(prompts)))
        for of_temperature in params:
            if not left:
                break
            outputs = self._answers([prompts[place] for place in left], of_temperature)
            for place, output in zip(left, outputs, strict=True):
                answers[place] = _Answer(output, of_temperature.temperature)
            if len(params) == 1:
                break
            doubted = [place for place, output in zip(left, outputs, strict=True) if self._is_doubted(output)]
            if of_temperature is params[0]:
                silent = self._silent([place for place in doubted if is_unlikely(_mean(answers[place]))], prompts)
                for place in silent:
                    answers[place] = None
                doubted = [place for place in doubted if place not in silent]
            left = doubted
        return answers

    def _is_doubted(self, output: RequestOutput) -> bool:
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return is_doubted(text, _mean(_Answer(output, 0.0)))

    def _silent(self, places: list[int], prompts: list[Any]) -> set[int]:
        """The windows in which nobody speaks, as the model says behind its start token."""
        if self.tokens.no_speech is None or not places:
            return set()
        asked = []
        for place in places:
            beginning = prompts[place]["decoder_prompt"]
            asked.append(prompts[place] | {"decoder_prompt": beginning[: beginning.index(self.tokens.start) + 1]})
        outputs = self._answers(asked, params_of_silence(self.tokens.no_speech))
        scores = (output.first.cumulative_logprob for output in outputs)
        return {
            place for place, one in zip(places, scores, strict=True) if one is not None and is_silent(math.exp(one))
        }

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
