"""Turns token ids into text as they come, never half a character.

A token's text depends on its neighbours (a character of several byte tokens, a leading space that decoders of the
SentencePiece kind strip at the start), so a small window of earlier tokens is decoded with the new ones and what was
not yet handed out is the new text. The window is cut at a place where no character was open, which keeps the work per
token constant. The whole answer at once is the same code with one push, so a streamed text equals an unstreamed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

# Tokens of the prompt that the window starts with.
_CONTEXT_TOKENS = 6
# The window is cut when a push leaves it longer than this.
_WINDOW_TOKENS = 16
# ... and, where the text never gets clean (endless invalid bytes), at this length wherever that falls.
_WINDOW_LIMIT = 64
# An open character has at most 3 of its 4 bytes, and a token at least one: after 4 tokens a trailing U+FFFD either
# begins anew or stays invalid.
_PATIENCE_TOKENS = 4


class Decoder(Protocol):
    """The part of a tokenizer that a detokenizer uses."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids, invalid UTF-8 as U+FFFD."""


class Detokenizer:
    """Text of one completion, piece by piece.

    Args:
        decoder: the tokenizer.
        prompt_token_ids: the tokens before the completion; its last tokens decide on a leading space. A character
            that the prompt left open belongs to the completion.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._hidden = decoder.special_token_ids if skip_special_tokens else frozenset[int]()
        context = [t for t in prompt_token_ids[-2 * _CONTEXT_TOKENS :] if t not in self._hidden][-_CONTEXT_TOKENS:]
        self._window = context
        self._clean_at = len(context)  # where the window is cut next: no character is open there
        self._num_sent = len(self._decode(context).rstrip(REPLACEMENT)) if context else 0  # chars of the window's text
        self._num_open_tokens = 0  # tokens since the text last ended in a whole character

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is certain now (often "", while a character is open)."""
        visible = [t for t in token_ids if t not in self._hidden] if self._hidden else token_ids
        if not visible:
            return ""
        self._window.extend(visible)
        text = self._decode(self._window)
        end = len(text)
        if text.endswith(REPLACEMENT):
            self._num_open_tokens += len(visible)
            if self._num_open_tokens < _PATIENCE_TOKENS:
                return ""
            end -= 1  # the last one may still become a character
        else:
            self._num_open_tokens = 0
        new = text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        if len(self._window) > _WINDOW_TOKENS:
            self._cut_window(len(text) - end)
        return new

    def flush(self) -> str:
        """Ends the completion: the text that was held back, an unfinished character as U+FFFD."""
        if not self._num_open_tokens:
            return ""
        self._num_open_tokens = 0
        text = self._decode(self._window)
        new = text[self._num_sent :]
        self._num_sent = len(text)
        return new

    def _cut_window(self, num_held: int) -> None:
        """Drops the window's older part; `num_held` characters at its end were not handed out yet."""
        if not self._num_open_tokens:
            window = self._window[self._clean_at :]
        elif len(self._window) > _WINDOW_LIMIT:
            window = self._window[-_CONTEXT_TOKENS:]
        else:
            return
        text = self._decode(window)
        if not text and len(self._window) <= _WINDOW_LIMIT:
            return  # no visible neighbour: a leading space would be lost
        self._window = window
        self._num_sent = max(0, len(text) - num_held)
        self._clean_at = len(window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip)


def detokenize(
    decoder: Decoder, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """Text of a whole completion; the same as pushing its tokens one by one."""
    detokenizer = Detokenizer(decoder, prompt_token_ids, skip_special_tokens)
    return detokenizer.push(token_ids) + detokenizer.flush()
