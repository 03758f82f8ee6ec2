"""The bytes that a token stands for, read from its entry in the vocabulary.

A token may be a part of a character: as text it is U+FFFD, and which part it was is lost. Three spellings are known:
one character a byte (GPT-2's), `▁` for a space and `<0xE2>` for a byte (SentencePiece's), and `##` for the rest of a
word (WordPiece's).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def token_bytes_reader(backend: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """A function that gives the bytes of a token id; b"" for one that the vocabulary does not have."""
    kinds = set(_kinds(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None))
    added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    spell = _byte_level if "ByteLevel" in kinds else _word_piece if "WordPiece" in kinds else _sentence_piece

    def token_bytes(token_id: int) -> bytes:
        token = backend.id_to_token(token_id)
        if token is None:
            return b""
        return token.encode() if token_id in added else spell(token)

    return token_bytes


def _kinds(decoder: Any) -> list[str]:
    """Names of a decoder and those in it."""
    if not isinstance(decoder, dict):
        return []
    return [decoder["type"], *(kind for inner in decoder.get("decoders", ()) for kind in _kinds(inner))]


def _byte_level(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _word_piece(token: str) -> bytes:
    return token.removeprefix("##").encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: bytes that are printable are themselves, the others follow from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_character()
