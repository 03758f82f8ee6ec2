"""The bytes of each token, read from how a tokenizer turns tokens into text.

Grammars need them, and so does showing a token by itself: it may be half a character. Tokens of byte-level and
byte-fallback tokenizers, and tokens with a sign for a space, have the same bytes everywhere. Others (WordPiece, word
lists) do not, and are refused where it matters.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mllm_compile.errors import MllmError

if TYPE_CHECKING:
    import tokenizers

_NUM_CHECKS = 64
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_bytes(backend: tokenizers.Tokenizer, num_tokens: int) -> tuple[bytes, ...]:
    """Bytes by token id; none for special tokens, and for ids without a token.

    Args:
        num_tokens: ids of the model, which may be more or fewer than the tokenizer's.

    Raises:
        MllmError: tokens of this tokenizer have no bytes of their own.
    """
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    to_bytes = _reader(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {})
    found = [b""] * num_tokens
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < num_tokens and token_id not in special:
            found[token_id] = to_bytes(token)
    _check(backend, found)
    return tuple(found)


def spelled_bytes(backend: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """A function that gives the bytes of any token as it is spelled, to be shown: of a special one its text, too.

    Of a tokenizer whose tokens have no bytes of their own it is the spelling, without WordPiece's `##`; of an id beyond
    the vocabulary b"".
    """
    added = backend.get_added_tokens_decoder()
    try:
        to_bytes = _reader(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {})
    except MllmError:

        def to_bytes(token: str) -> bytes:
            return token.removeprefix("##").encode()

    def bytes_of(token_id: int) -> bytes:
        token = backend.id_to_token(token_id)
        if token is None:
            return b""
        return token.encode() if token_id in added else to_bytes(token)

    return bytes_of


def fallback_bytes(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Id → byte of the tokens (`<0xE4>`) that the decoder joins to characters run by run; empty if it joins none."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    if "ByteFallback" not in _kinds(decoder):
        return {}
    tokens = ((f"<0x{byte:02{letter}}>", byte) for byte in range(256) for letter in "Xx")
    return {token_id: byte for token, byte in tokens if (token_id := backend.token_to_id(token)) is not None}


def _kinds(decoder: Mapping[str, Any]) -> set[str]:
    """The kinds of a decoder's steps, as tokenizer.json has them."""
    if decoder.get("type") == "Sequence":
        return set().union(*map(_kinds, decoder["decoders"]))
    return {decoder.get("type", "")}


def _reader(decoder: Mapping[str, Any]) -> Callable[[str], bytes]:
    """The function from a token's spelling to its bytes, by the decoder of tokenizer.json."""
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    spaces = [" "]
    for step in steps:
        if step.get("type") == "Metaspace":
            spaces.append(step["replacement"])
        elif step.get("type") == "Replace" and step["content"] == " " and "String" in step["pattern"]:
            spaces.append(step["pattern"]["String"])
        elif step.get("type") not in ("ByteFallback", "Fuse", "Strip"):  # the last of them changes but a text's ends
            raise _refused(f"its decoder is {step.get('type') or 'none'}")
    if len(spaces) == 1 and "ByteFallback" not in kinds:
        raise _refused("it joins tokens by rules of its own")
    has_bytes = "ByteFallback" in kinds

    def read(token: str) -> bytes:
        if has_bytes and _BYTE.fullmatch(token):
            return bytes.fromhex(token[3:5])
        for space in spaces[1:]:
            token = token.replace(space, " ")
        return token.encode()

    return read


def _byte_level_alphabet() -> dict[str, int]:
    """Characters that GPT-2 and its followers use for bytes: most bytes have their own character, the others one from
    U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def _check(backend: tokenizers.Tokenizer, found: list[bytes]) -> None:
    """
    Raises:
        MllmError: the tokenizer itself makes another text of some tokens.
    """
    chance = random.Random(0)
    whole = [token_id for token_id, data in enumerate(found) if data and b"\xef\xbf\xbd" not in data and _is_text(data)]
    for _ in range(_NUM_CHECKS if whole else 0):
        ids = chance.choices(whole, k=8)
        text = backend.decode(ids, skip_special_tokens=False)
        if text.lstrip(" ") != b"".join(found[token_id] for token_id in ids).decode().lstrip(" "):
            raise _refused(f"tokens {ids} become {text!r}")


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refused(why: str) -> MllmError:
    return MllmError(
        f"structured_outputs are not served with this model's tokenizer: a token of it has no bytes of its own ({why})."
    )
