"""Byte tokens of tokenizers that fall back to bytes (`<0xE4>`), whose runs become text as a whole.

Such a tokenizer decodes a run of byte tokens to its characters if all of it is UTF-8. Otherwise each byte becomes a
U+FFFD, also the bytes before the bad one. A stream cannot take text back, so a run is held until it has ended or is
known to be bad. A run of many tokens is not held longer than MOST_HELD: its whole characters are given out, and count
as a run that has ended. Only a run that is longer, and bad behind that, has another text than the tokenizer's own.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"

MOST_HELD = 128  # tokens: forty characters of most scripts that fall back
_LAST = 6  # tokens that are remembered as what is before the next ones
_OPEN = 3  # most bytes of a character that is not whole


class ByteRun:
    """One run of byte tokens.

    Args:
        byte_of: id → byte.
        decode: the tokenizer's own function, for a run at the very start of a text, where it may strip a space; None
            elsewhere.
    """

    def __init__(self, byte_of: Mapping[int, int], decode: Callable[[Sequence[int]], str] | None) -> None:
        self._byte_of = byte_of
        self._decode = decode
        self._held: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._is_bad = False
        self.last: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is certain now."""
        self.last = [*self.last, *token_ids][-_LAST:]
        return "".join(map(self._take, token_ids))

    def end(self) -> str:
        """The text of what is held: the run has ended."""
        held, self._held = self._held, []
        if self._utf8.getstate()[0]:  # a character is not whole
            return REPLACEMENT * len(held)
        return self._text(held)

    def _take(self, token_id: int) -> str:
        if self._is_bad:
            return REPLACEMENT
        self._held.append(token_id)
        try:
            self._utf8.decode(bytes([self._byte_of[token_id]]))
        except UnicodeDecodeError:
            self._is_bad = True
            self._utf8.reset()
            held, self._held = self._held, []
            return REPLACEMENT * len(held)
        if len(self._held) < MOST_HELD:
            return ""
        num_open = len(self._utf8.getstate()[0])
        whole = self._held[: MOST_HELD - num_open]
        self._held = self._held[MOST_HELD - num_open :]
        return self._text(whole)

    def _text(self, token_ids: list[int]) -> str:
        decode, self._decode = self._decode, None
        if decode is not None and token_ids:
            return decode(token_ids)
        return bytes(self._byte_of[token_id] for token_id in token_ids).decode()


def open_tokens(token_ids: Sequence[int], byte_of: Mapping[int, int]) -> int:
    """The number of tokens at the end that are the begin of a character."""
    for count in range(1, min(_OPEN, len(token_ids)) + 1):
        if token_ids[-count] not in byte_of:
            return 0
        data = bytes(byte_of[token_id] for token_id in token_ids[-count:])
        utf8 = codecs.getincrementaldecoder("utf-8")()
        try:
            if not utf8.decode(data):  # all of it is open
                return count
        except UnicodeDecodeError:
            continue
    return 0
