"""Engine.transcribe: sounds are cut into windows, which are prompts, and the answers put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mllm_compile.engine.outputs import RequestOutput
from mllm_compile.engine.speech.cuts import cut
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.engine.speech.transcripts import Segment, Transcript, segments_between
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
        decoder = self.decoder
        if decoder is None or not decoder.source.is_sound:
            raise RequestError("the model reads no sounds, which transcribe needs. Serve a model such as Whisper.")
        if isinstance(decoder.log_mel, str):
            raise RequestError(f"{decoder.log_mel}.")
        tokens = SpeechTokens.of(decoder.tokenizer, decoder.vocab_size)
        # The tokens that the model's makers suppress; where a time comes first, the end is not among them.
        usual = SamplingParams(
            temperature=temperature,
            max_tokens=None,
            logit_bias=self.default_params.logit_bias,
            min_tokens=0 if timestamps else self.default_params.min_tokens,
            logprobs=0,
            detokenize=False,
        )
        speech = _Speech(self, tokens, decoder.log_mel, decoder.tokenizer, priority)
        given = list(sounds) if isinstance(sounds, list) else [sounds]
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(f"prompt: expected a text, got {typed_repr(prompt)}")
        samples = [read_samples(one, decoder.log_mel.rate) for one in given]
        languages = [language] * len(samples)
        if language is None and tokens.languages:
            languages = speech.languages(samples)
        earlier = speech.tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False) if prompt else []
        beginnings = [tokens.beginning(one, task, timestamps, earlier) for one in languages]
        return [
            Transcript(
                "".join(segment.text for segment in segments).strip(),
                one,
                sound.size / decoder.log_mel.rate,
                task,
                [_stripped(segment) for segment in segments],
            )
            for one, sound, segments in zip(
                languages, samples, speech.segments(samples, beginnings, usual), strict=True
            )
        ]


@dataclass(frozen=True)
class _Speech:
    engine: SpeechMethods
    tokens: SpeechTokens
    log_mel: LogMel
    tokenizer: Any
    priority: int

    def languages(self, samples: Sequence[np.ndarray]) -> list[str | None]:
        """The likeliest language of each sound's first window."""
        params = SamplingParams(
            temperature=0, max_tokens=1, allowed_token_ids=list(self.tokens.languages.values()), detokenize=False
        )
        prompts = [self._prompt(one[: self.log_mel.samples], [self.tokens.start]) for one in samples]
        names = {one: name for name, one in self.tokens.languages.items()}
        return [names[output.token_ids[0]] for output in self._answers(prompts, params)]

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
        rate, ids = self.log_mel.rate, output.token_ids
        times = [self.tokens.seconds(one) for one in ids]
        score = output.first.cumulative_logprob
        mean = None if score is None or not ids else score / len(ids)
        found = []
        for first, end, start, last in segments_between(times, at / rate, (at + count) / rate):
            text = self.tokenizer.decode(ids[first:end], skip_special_tokens=True)
            if text:
                found.append(Segment(start, last, text, ids[first:end], mean))
        return found

    def _answers(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        outputs = self.engine.generate(prompts, params, priority=self.priority)
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise RequestError(failed)
        return outputs

    def _prompt(self, samples: np.ndarray, beginning: list[int]) -> dict[str, Any]:
        sound = {"multi_modal_data": {"audio": (samples, self.log_mel.rate)}}
        return {"encoder_prompt": sound, "decoder_prompt": beginning}


def _stripped(segment: Segment) -> Segment:
    return Segment(segment.start, segment.end, segment.text.strip(), segment.token_ids, segment.avg_logprob)
