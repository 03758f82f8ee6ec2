"""Turns token ids into text as they come, never half a character.

A token's text depends on its neighbours: a character may have several byte tokens, and decoders like SentencePiece's
strip a leading space at the start. So a small window of earlier tokens is decoded with the new ones; the part that was
not yet handed out is the new text. The window is cut at a place where no character was open, which keeps the work per
token constant. The whole answer at once is the same code with one push, so a streamed text equals an unstreamed one.

Bytes that fall back are a second kind (byte_runs.py), and spaces before punctuation that a model wants gone a third
(clean_spaces.py). Pushes of several tokens give the text of the same tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

from mllm_compile.text.byte_runs import REPLACEMENT, ByteRun, open_tokens
from mllm_compile.text.clean_spaces import SpaceCleaner

# Tokens of the prompt that the window starts with.
_CONTEXT_TOKENS = 6
# The window is cut when a push leaves it longer than this.
_WINDOW_TOKENS = 16
# ... and, where the text never gets clean (endless invalid bytes), at this length wherever that falls.
_WINDOW_LIMIT = 64
# An open character has at most 3 of its 4 bytes, and a token at least one: after 4 tokens a trailing U+FFFD either
# begins anew or stays invalid.
_PATIENCE_TOKENS = 4

_Decode = Callable[[Sequence[int]], str]


class Decoder(Protocol):
    """The part of a tokenizer that a detokenizer uses."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""

    @property
    def byte_token_ids(self) -> Mapping[int, int]:
        """Id → byte of the tokens whose runs are decoded as a whole; empty where each byte is decoded by itself."""

    @property
    def cleans_up_spaces(self) -> bool:
        """True if the model wants spaces before punctuation taken out."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, as_it_is: bool = False) -> str:
        """Text of the ids, invalid UTF-8 as U+FFFD; `as_it_is`: with all spaces."""


class Detokenizer:
    """Text of one completion, piece by piece.

    Args:
        decoder: the tokenizer.
        prompt_token_ids: the tokens before the completion; its last tokens decide on a leading space. A character
            that the prompt left open belongs to the completion.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._hidden = decoder.special_token_ids if skip_special_tokens else frozenset[int]()
        self._bytes = decoder.byte_token_ids
        self._cleaner = SpaceCleaner() if decoder.cleans_up_spaces else None
        context = [t for t in prompt_token_ids[-2 * _CONTEXT_TOKENS :] if t not in self._hidden][-_CONTEXT_TOKENS:]
        num_open = open_tokens(context, self._bytes)
        decode = partial(decoder.decode, skip_special_tokens=skip_special_tokens, as_it_is=True)
        self._window = _Window(decode, context[: len(context) - num_open], ends_whole=bool(self._bytes))
        self._run: ByteRun | None = None
        if num_open:
            self._push_bytes(context[-num_open:])

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is certain now (often "", while a character is open)."""
        visible = [t for t in token_ids if t not in self._hidden] if self._hidden else token_ids
        if not visible:
            return ""
        text = self._in_runs(visible) if self._bytes else self._window.push(visible)
        return text if self._cleaner is None else self._cleaner.push(text)

    def flush(self) -> str:
        """Ends the completion: the text that was held back, an unfinished character as U+FFFD."""
        text = self._end_run() + self._window.flush()
        return text if self._cleaner is None else self._cleaner.push(text) + self._cleaner.flush()

    @property
    def is_held(self) -> bool:
        """True if some text of the tokens so far has not been handed out."""
        has_spaces = self._cleaner is not None and self._cleaner.is_held
        return self._run is not None or self._window.is_held or has_spaces

    def _in_runs(self, token_ids: Sequence[int]) -> str:
        parts = []
        for is_byte, tokens in groupby(token_ids, self._bytes.__contains__):
            if is_byte:
                parts.append(self._push_bytes(list(tokens)))
            else:
                parts += [self._end_run(), self._window.push(list(tokens))]
        return "".join(parts)

    def _push_bytes(self, token_ids: list[int]) -> str:
        before = ""
        if self._run is None:
            before = self._window.flush()
            self._run = ByteRun(self._bytes, self._window.decode if self._window.is_empty else None)
        return before + self._run.push(token_ids)

    def _end_run(self) -> str:
        if self._run is None:
            return ""
        text = self._run.end()
        self._window.follow(self._run.last)
        self._run = None
        return text


class _Window:
    """The text of tokens that each have text, or bytes of their own.

    Args:
        decode: gives the text of tokens.
        context: the tokens before the first one; their text is known already.
        ends_whole: no character is open behind it.
    """

    def __init__(self, decode: _Decode, context: list[int], *, ends_whole: bool) -> None:
        self.decode = decode
        self._tokens = context
        self._clean_at = len(context)  # where the window is cut next: no character is open there
        text = decode(context) if context else ""
        self._num_sent = len(text if ends_whole else text.rstrip(REPLACEMENT))  # chars of the window's text
        self._num_open = 0  # tokens since the text last ended in a whole character

    @property
    def is_empty(self) -> bool:
        """True if no token was before."""
        return not self._tokens

    @property
    def is_held(self) -> bool:
        """True if some text was not handed out."""
        return bool(self._num_open)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is certain now."""
        self._tokens.extend(token_ids)
        text = self.decode(self._tokens)
        end = len(text)
        if text.endswith(REPLACEMENT):
            self._num_open = self._count_open(len(token_ids))
            if self._num_open >= _PATIENCE_TOKENS:
                end -= 1  # the last one may still become a character
            elif self._num_open < len(token_ids):
                end = len(self.decode(self._tokens[: -self._num_open]))
            else:
                return ""
        else:
            self._num_open = 0
        new = text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        if len(self._tokens) > _WINDOW_TOKENS:
            self._cut(len(text) - end)
        return new

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes tokens whose text was handed out by others, as what is before the next ones."""
        self._tokens = [*self._tokens, *token_ids][-_CONTEXT_TOKENS:]
        self._clean_at = len(self._tokens)
        self._num_sent = len(self.decode(self._tokens))
        self._num_open = 0

    def flush(self) -> str:
        """The text that was held back, an unfinished character as U+FFFD."""
        if not self._num_open:
            return ""
        self._num_open = 0
        text = self.decode(self._tokens)
        new = text[self._num_sent :]
        self._num_sent = len(text)
        return new

    def _count_open(self, num_new: int) -> int:
        """The tokens since the text last ended in a whole character, or as many as patience has."""
        for count in range(1, min(num_new, _PATIENCE_TOKENS)):
            if not self.decode(self._tokens[:-count]).endswith(REPLACEMENT):
                return count
        return num_new + self._num_open

    def _cut(self, num_held: int) -> None:
        """Drops the window's older part; `num_held` characters at its end were not handed out yet."""
        if not self._num_open:
            tokens = self._tokens[self._clean_at :]
        elif len(self._tokens) > _WINDOW_LIMIT:
            tokens = self._tokens[-_CONTEXT_TOKENS:]
        else:
            return
        text = self.decode(tokens)
        if not text and len(self._tokens) <= _WINDOW_LIMIT:
            return  # no visible neighbour: a leading space would be lost
        self._tokens = tokens
        self._num_sent = max(0, len(text) - num_held)
        self._clean_at = len(tokens)


def detokenize(
    decoder: Decoder, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """Text of a whole completion; the same as pushing its tokens one by one."""
    detokenizer = Detokenizer(decoder, prompt_token_ids, skip_special_tokens)
    return detokenizer.push(token_ids) + detokenizer.flush()
