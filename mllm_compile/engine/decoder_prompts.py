"""The decoder's side of prompts for an encoder-decoder: the tokens that it begins with, ahead of its answer.

A prompt is the encoder's; the decoder begins with its start token, and the one that the model's makers force behind it.
A caller may name another beginning, by text, token ids or the language of the answer.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, Self

from mllm_compile.errors import RequestError
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.runtime.sources.facts import SourceFacts

DECODER_KEYS = ("encoder_prompt", "decoder_prompt", "target_language")


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
    """

    start: tuple[int, ...]
    vocab_size: int
    source: SourceFacts
    tokenizer: DecoderTokenizer | None

    @classmethod
    def of(cls, told: Mapping[str, Any] | None, vocab_size: int, tokenizer: DecoderTokenizer | None) -> Self | None:
        """The decoder's side of prompts as a server's engine tells it; None of another model."""
        if told is None:
            return None
        return cls(tuple(told["start"]), vocab_size, from_json(SourceFacts, told["facts"]), tokenizer)

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
        """The ids of a decoder_prompt, behind the start token where they do not begin with it."""
        if isinstance(given, Mapping) and len(given) == 1:  # vLLM's TextPrompt or TokensPrompt
            given = given.get("prompt", given.get("prompt_token_ids"))
        if isinstance(given, str):
            if self.tokenizer is None:
                raise RequestError("decoder_prompt: the model has no tokenizer; give token ids")
            ids = self.tokenizer.encode(given, add_special_tokens=False) if given else []
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
        return ids if ids[:1] == list(self.start[:1]) else [*self.start[:1], *ids]


def _key_of(prompt: Any) -> str:
    return "prompt" if isinstance(prompt, str) else "prompt_token_ids"
