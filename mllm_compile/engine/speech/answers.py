"""Parameters for windows of sound, and the segments that their answers are; for the engine and the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from mllm_compile.engine.speech.doubt import Written
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.engine.speech.transcripts import Segment, Transcript, segments_between
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams

# Doubt is of the model's own distribution, whatever runtime.logprobs_mode is: of one allowed token it would be certain.
_MODE: Final = "raw_logprobs"


class SpeechTokenizer(Protocol):
    """The methods of a tokenizer that are called here."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def params_of_language(tokens: SpeechTokens) -> SamplingParams:
    """The parameters by which a model says the language of a window, whose decoder begins with the start token."""
    languages = list(tokens.languages.values())
    return SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=languages, detokenize=False)


def params_of_silence(no_speech: int) -> SamplingParams:
    """The parameters by which it says how likely nobody speaks in a window, behind the start token."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        allowed_token_ids=[no_speech],
        logprobs=0,
        logprobs_mode=_MODE,
        detokenize=False,
    )


def params_of_text(
    temperature: float, defaults: SamplingParams, tokens: SpeechTokens, has_times: bool
) -> SamplingParams:
    """The parameters by which it writes down a window. The defaults name the tokens that the model's makers suppress;
    where a time comes first, the end is not among them. Times follow Whisper's rule.

    Raises:
        RequestError: there is no such temperature.
    """
    return SamplingParams(
        temperature=temperature,
        max_tokens=None,
        logit_bias=defaults.logit_bias,
        min_tokens=0 if has_times else defaults.min_tokens,
        logprobs=0,
        logprobs_mode=_MODE,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(timestamps=tokens.no_timestamps) if has_times else None,
    )


def ids_of_prompt(tokenizer: SpeechTokenizer, prompt: str | None) -> list[int]:
    """The tokens of what was said before."""
    return tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False) if prompt else []


def segments_of(
    tokens: SpeechTokens,
    tokenizer: SpeechTokenizer,
    written: Written,
    first: float,
    last: float,
) -> list[Segment]:
    """The segments of a window's answer; their texts have the spaces between them.

    Args:
        first, last: seconds of the sound.
    """
    ids, mean, temperature = written
    times = [tokens.seconds(one) for one in ids]
    found = []
    for begin, end, start, stop in segments_between(times, first, last):
        text = tokenizer.decode(ids[begin:end], skip_special_tokens=True)
        if text:
            found.append(Segment(start, stop, text, ids[begin:end], mean, temperature))
    return found


def transcript_of(segments: Sequence[Segment], language: str | None, duration: float, task: str) -> Transcript:
    """The transcript of a sound's segments, in their order."""
    text = "".join(one.text for one in segments).strip()
    alone = [replace(one, text=one.text.strip()) for one in segments]
    return Transcript(text, language, duration, task, alone)
