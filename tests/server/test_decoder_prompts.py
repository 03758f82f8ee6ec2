"""The decoder's side of a completion request, of a model with an encoder; another model refuses it by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.runtime.sources.facts import SourceFacts
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.api.fields import CompletionFields
from mllm_compile.server.api.prompts import _decoder_ids
from mllm_compile.server.flow.choice import PromptRun

WORDS = {"fra_Latn": 30, "__de__": 31}


class Words:
    def token_to_id(self, token: str) -> int | None:
        return WORDS.get(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def facts(has_encoder: bool = True) -> Any:
    told = {"start": [3, 7], "facts": {"max_length": 16, "vocab_size": 100, "bins": 0, "frames": 0}}
    told["log_mel"] = "the encoder reads texts"
    decoder = DecoderPrompts.of(told if has_encoder else None, 100, Words())
    return SimpleNamespace(decoder=decoder)


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ({}, [3, 7]),
        ({"target_language": "fra_Latn"}, [3, 30]),
        ({"target_language": "de"}, [3, 31]),
        ({"decoder_prompt": [5, 6]}, [5, 6]),
        ({"decoder_prompt": "aa bbbb"}, [3, 2, 4]),
        ({"decoder_prompt": []}, [3]),
    ],
)
def test_the_decoder_begins_with_what_is_asked(asked: dict[str, Any], ids: list[int]) -> None:
    assert _decoder_ids(facts(), CompletionFields(prompt="a", **asked)) == ids


def test_answers_follow_the_decoders_tokens_not_the_encoders() -> None:
    assert PromptRun(1, [10, 11], None, False, decoder_ids=[3, 7]).ids_ahead == [3, 7]
    assert PromptRun(1, [10, 11], None, False).ids_ahead == [10, 11]


@pytest.mark.parametrize(
    ("has_encoder", "asked", "said"),
    [
        (True, {"target_language": "xx"}, "no token 'xx'"),
        (True, {"decoder_prompt": [100]}, "outside of the model's vocabulary"),
        (True, {"echo": True}, "echo: expected false"),
        (False, {"target_language": "fra_Latn"}, "target_language: expected none, as the model has no encoder"),
        (False, {"decoder_prompt": [3]}, "decoder_prompt: expected none"),
    ],
)
def test_what_it_cannot_begin_with_is_refused(has_encoder: bool, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        _decoder_ids(facts(has_encoder), CompletionFields(prompt="a", **asked))


def test_another_model_has_no_decoders_tokens() -> None:
    assert _decoder_ids(facts(has_encoder=False), CompletionFields(prompt="a")) is None
    assert facts().decoder.source == SourceFacts(max_length=16, vocab_size=100)
