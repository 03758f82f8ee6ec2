"""The bytes of tokens, for each kind of tokenizer; kinds whose tokens have none are refused."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mllm_compile.errors import MllmError
from mllm_compile.text.token_bytes import spelled_bytes, token_bytes
from mllm_compile.text.tokenizer import load_tokenizer
from tests.tiny_model import TINY

TEXT = 'def f(x):\n\treturn {"naïve": "日本", \'e\': "€🎉"}\n' * 2


def test_the_embedded_models_tokens_are_their_texts_bytes():
    tokenizer = load_tokenizer(TINY)
    tokens = tokenizer.token_bytes(tokenizer.vocab_size)
    ids = tokenizer.encode(TEXT)
    assert b"".join(tokens[token_id] for token_id in ids) == TEXT.encode()
    assert {tokens[token_id] for token_id in tokenizer.special_token_ids} == {b""}
    assert len({data for data in tokens if data}) == sum(map(bool, tokens)), "no two are alike"
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)


def test_a_model_may_have_more_rows_than_its_tokenizer_has_tokens_or_fewer():
    tokenizer = load_tokenizer(TINY)
    size = tokenizer.vocab_size
    tokens = tokenizer.token_bytes(size)
    assert tokenizer.token_bytes(size + 7) == tokens + (b"",) * 7
    assert tokenizer.token_bytes(100) == tokens[:100]


def test_byte_fallback_tokens_are_bytes_and_the_sign_for_a_space_is_one():
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "cat", "▁日本", "<0xZZ>"]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    tokens = token_bytes(backend, 263)
    assert tokens[:3] == (b"", b"\x00", b"\x01")
    assert tokens[256] == b"\xff"
    assert tokens[257:262] == (b" ", b" the", b"cat", " 日本".encode(), b"<0xZZ>")
    assert tokens[262] == b"<tool call>"


def test_metaspace_tokens_have_spaces():
    backend = Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁": 2}, []))
    backend.decoder = decoders.Metaspace()
    assert token_bytes(backend, 3) == (b" a", b"b", b" ")


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        (decoders.WordPiece(), "its decoder is WordPiece"),
        (decoders.BPEDecoder(), "its decoder is BPEDecoder"),
        (decoders.CTC(), "its decoder is CTC"),
        (None, "its decoder is none"),
        (decoders.Sequence([decoders.Fuse()]), "it joins tokens by rules of its own"),
    ],
)
def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_refused(decoder, said):
    backend = Tokenizer(models.WordLevel({"a": 0, "##b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(MllmError, match=f"not served with this model's tokenizer: .*{said}"):
        token_bytes(backend, 2)


def test_a_decoder_that_makes_another_text_is_found_out():
    backend = Tokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])  # of every token
    with pytest.raises(MllmError, match=r"tokens \[.*\] become '"):
        token_bytes(backend, 2)


def test_parts_of_a_character_are_shown_where_text_would_lose_them():
    tokenizer = load_tokenizer(TINY)
    for text in ("naïve café ☕", "日本語", " def f():\n\t"):
        assert b"".join(map(tokenizer.bytes_of_token, tokenizer.encode(text))) == text.encode()


@pytest.mark.parametrize(
    ("decoder", "token", "data"),
    [
        (decoders.ByteLevel(), "Ġthe", b" the"),
        (decoders.ByteLevel(), "âĺ", b"\xe2\x98"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), "<0xE2>", b"\xe2"),
        (decoders.Metaspace(), "▁a", b" a"),
        (decoders.WordPiece(), "##ing", b"ing"),
        (None, "word", b"word"),
    ],
)
def test_every_kind_of_token_is_shown_as_it_is_spelled(decoder, token, data):
    backend = Tokenizer(models.WordLevel({"u": 0, token: 1}, unk_token="u"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>")])
    shown = spelled_bytes(backend)
    assert (shown(1), shown(2), shown(99)) == (data, b"<s>", b"")
