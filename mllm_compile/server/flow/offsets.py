"""Where each token of a completion begins in its text: behind the characters that are whole before it.

Text comes later than its tokens where a character is open, or a run of bytes. Until it comes, the whole characters in
these tokens' bytes are counted in its place.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Set


class TokenOffsets:
    """Counts the characters before a token.

    Args:
        bytes_of: gives the bytes of a token.
        hidden: tokens without text.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], hidden: Set[int]) -> None:
        self._bytes_of = bytes_of
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_given = 0  # characters that were handed out
        self._num_held = 0  # whole ones of tokens whose text has not come

    @property
    def next(self) -> int:
        """The offset of the token that comes next."""
        return self._num_given + self._num_held

    def took(self, token_id: int, text: str, is_held: bool) -> None:
        """Counts a token.

        Args:
            text: what it made certain.
            is_held: some text of it, or of tokens before, has not come yet.
        """
        self._num_given += len(text)
        if not is_held:
            self._num_held = 0
            self._decoder.reset()
        elif token_id not in self._hidden:
            new = self._decoder.decode(self._bytes_of(token_id))
            self._num_held = max(0, self._num_held + len(new) - len(text))
