"""Bytes of tokens, by the three spellings of vocabularies."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from mllm_compile.text.token_bytes import token_bytes_reader
from mllm_compile.text.tokenizer import load_tokenizer
from tests.tiny_model import TINY


def backend(vocabulary: list[str], decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="u"))
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens([AddedToken("<s>")])
    return made


def test_parts_of_a_character_are_told_where_text_would_lose_them():
    tokenizer = load_tokenizer(TINY)
    for text in ("naïve café ☕", "日本語", " def f():\n\t"):
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize(
    ("decoder", "token", "data"),
    [
        (decoders.ByteLevel(), "Ġthe", b" the"),
        (decoders.ByteLevel(), "âĺ", b"\xe2\x98"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), "▁the", b" the"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "<0xE2>", b"\xe2"),
        (decoders.Metaspace(), "▁a", b" a"),
        (decoders.WordPiece(), "##ing", b"ing"),
        (None, "word", b"word"),
    ],
)
def test_each_spelling_is_read(decoder, token, data):
    read = token_bytes_reader(backend(["u", token], decoder))
    assert read(1) == data


def test_special_tokens_are_their_text_and_ids_beyond_the_vocabulary_nothing():
    read = token_bytes_reader(backend(["u"], decoders.ByteLevel()))
    assert read(1) == b"<s>"
    assert read(99) == b""
