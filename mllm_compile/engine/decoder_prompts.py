"""The decoder's side of prompts for an encoder-decoder: the tokens that it begins with, ahead of its answer.

A prompt is the encoder's; the decoder begins with its start token, and the one that the model's makers force behind it.
A caller may name another beginning, by text, token ids or the language of the answer.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.media.log_mel import LogMel
from mllm_compile.media.samples import read_samples
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.runtime.sources.facts import SourceFacts
from mllm_compile.runtime.sources.request import RequestSource

DECODER_KEYS = ("encoder_prompt", "decoder_prompt", "target_language")
_SOUND = "audio"


class DecoderTokenizer(Protocol):
    """The methods of a tokenizer that are called here."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_to_id(self, token: str) -> int | None: ...


@dataclass(frozen=True)
class DecoderPrompts:
    """
    Attributes:
        start: the ids that a decoder begins with: its start token, and one that is forced behind it.
        vocab_size: ids that it knows.
        source: what the encoder reads.
        tokenizer: None: beginnings are token ids.
        log_mel: makes windows of sounds, where the encoder reads these; a text: why it makes none.
    """

    start: tuple[int, ...]
    vocab_size: int
    source: SourceFacts
    tokenizer: DecoderTokenizer | None
    log_mel: LogMel | str = "the encoder reads texts"

    @classmethod
    def of(cls, told: Mapping[str, Any] | None, vocab_size: int, tokenizer: DecoderTokenizer | None) -> Self | None:
        """The decoder's side of prompts as a server's engine tells it; None of another model."""
        if told is None:
            return None
        log_mel = told["log_mel"]
        windows = log_mel if isinstance(log_mel, str) else from_json(LogMel, log_mel)
        return cls(tuple(told["start"]), vocab_size, from_json(SourceFacts, told["facts"]), tokenizer, windows)

    def told(self) -> dict[str, Any]:
        """The form that `of` reads."""
        log_mel = self.log_mel if isinstance(self.log_mel, str) else asdict(self.log_mel)
        return {"facts": asdict(self.source), "start": self.start, "log_mel": log_mel}

    def split(self, item: Any) -> tuple[Any, list[int]]:
        """(the encoder's prompt, the ids that the decoder begins with) of a prompt as a caller gives it.

        Raises:
            RequestError: the decoder's part is not what is expected.
        """
        if not isinstance(item, Mapping) or not any(key in item for key in DECODER_KEYS):
            return item, list(self.start)
        rest = {key: value for key, value in item.items() if key not in DECODER_KEYS}
        of_encoder, beginning, language = (item.get(key) for key in DECODER_KEYS)
        if of_encoder is not None:
            if "prompt" in rest or "prompt_token_ids" in rest:
                raise RequestError("a prompt has encoder_prompt, or prompt for the same; got both. Leave one out.")
            rest |= of_encoder if isinstance(of_encoder, Mapping) else {_key_of(of_encoder): of_encoder}
        if beginning is not None and language is not None:
            raise RequestError("a prompt has decoder_prompt or target_language; got both. Leave one out.")
        if language is not None:
            return rest, [*self.start[:1], self._language(language)]
        return rest, list(self.start) if beginning is None else self._beginning(beginning)

    def split_sound(self, item: Any) -> tuple[RequestSource, list[int]]:
        """Divides a prompt with a sound into the encoder's side and the decoder's.

        Args:
            item: vLLM's dict with `multi_modal_data` {"audio": …}, alone, as encoder_prompt, or beside the decoder's
                `prompt`.

        Returns:
            The encoder's input, and the ids that the decoder begins with.

        Raises:
            RequestError: it has no sound, or one that is refused.
        """
        if isinstance(self.log_mel, str):
            raise RequestError(f"{self.log_mel}. Give a model whose sounds are served.")
        if not isinstance(item, Mapping):
            raise RequestError(_NO_SOUND.format(typed_repr(item)))
        given = {key: value for key, value in item.items() if value is not None}
        of_encoder = given.pop("encoder_prompt", None)
        beside = dict(of_encoder) if isinstance(of_encoder, Mapping) else {}
        media = (given if of_encoder is None else beside).pop("multi_modal_data", None)
        if not isinstance(media, Mapping) or set(media) != {_SOUND}:
            raise RequestError(_NO_SOUND.format(typed_repr(item)))
        given.pop("cache_salt", None)
        told = {"encoder_prompt": [0], **{key: given.pop(key, None) for key in DECODER_KEYS[1:]}}
        if of_encoder is None and told["decoder_prompt"] is None:
            told["decoder_prompt"] = given.pop("prompt", None) or given.pop("prompt_token_ids", None)
        rest = {**given, **beside}
        unknown = next((key for key, value in rest.items() if value is not None and (key != "prompt" or value)), None)
        if unknown is not None:
            raise RequestError(f"a prompt with a sound has no use for {short_repr(unknown)}. Leave it out.")
        _, ids = self.split(told)
        sound = media[_SOUND]
        if isinstance(sound, RequestSource):  # a server's front has made its window
            return sound, ids
        return self.source_of(read_samples(sound, self.log_mel.rate)), ids

    def source_of(self, samples: np.ndarray) -> RequestSource:
        """The source that samples at the model's rate make.

        Raises:
            RequestError: they are more than a window.
        """
        assert not isinstance(self.log_mel, str), "looked at by the caller"
        if samples.size > self.log_mel.samples:
            seconds, most = samples.size / self.log_mel.rate, self.log_mel.samples / self.log_mel.rate
            raise RequestError(
                f"the sound has {seconds:.1f} s; the encoder reads at most {most:g}. Use Engine.transcribe, which cuts "
                "it."
            )
        return self.source_of_window(self.log_mel.window(samples).ravel())

    def source_of_window(self, window: np.ndarray) -> RequestSource:
        """The source of a window [bins * frames] float32."""
        return RequestSource.of_sound(window, self.source.max_length)

    def _language(self, language: Any) -> int:
        if not isinstance(language, str) or self.tokenizer is None:
            raise RequestError(
                f"target_language: expected the name of a token of the model's tokenizer, got {typed_repr(language)}"
            )
        names = (language, f"__{language}__", f"<2{language}>", f">>{language}<<")
        found = next((one for one in map(self.tokenizer.token_to_id, names) if one is not None), None)
        if found is None:
            raise RequestError(
                f"target_language: the tokenizer has no token {short_repr(language)}. Name the language as the model "
                "does, such as fra_Latn, fr_XX or fr."
            )
        return found

    def _beginning(self, given: Any) -> list[int]:
        """The ids of a decoder_prompt as they are; those of a text are behind the start token."""
        if isinstance(given, Mapping) and len(given) == 1:  # vLLM's TextPrompt or TokensPrompt
            given = given.get("prompt", given.get("prompt_token_ids"))
        if isinstance(given, str):
            if self.tokenizer is None:
                raise RequestError("decoder_prompt: the model has no tokenizer; give token ids")
            ids = self.tokenizer.encode(given, add_special_tokens=False) if given else []
            ids = ids if ids[:1] == list(self.start[:1]) else [*self.start[:1], *ids]
        elif isinstance(given, Seq) and not isinstance(given, bytes | bytearray):
            wrong = next((one for one in given if isinstance(one, bool) or not isinstance(one, numbers.Integral)), None)
            if wrong is not None:
                raise RequestError(f"decoder_prompt: token ids are integers, got {typed_repr(wrong)} among them")
            ids = [int(one) for one in given]
        else:
            raise RequestError(f"decoder_prompt: expected a text or a list of token ids, got {typed_repr(given)}")
        outside = next((one for one in ids if not 0 <= one < self.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"decoder_prompt: token id {short_repr(outside)} is outside of the model's vocabulary of "
                f"{self.vocab_size} tokens"
            )
        return ids or list(self.start[:1])


_NO_SOUND = (
    'the encoder reads sounds: expected {{"encoder_prompt": {{"multi_modal_data": {{"audio": (samples, rate)}}}}}}, '
    "got {}"
)


def _key_of(prompt: Any) -> str:
    return "prompt" if isinstance(prompt, str) else "prompt_token_ids"
