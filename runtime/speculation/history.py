"""The tokens of one request in an array that grows. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROOM = 256  # tokens


class TokenHistory:
    """The newest tokens of a text.

    Args:
        most: tokens that are kept at least; older ones are forgotten before there are twice as many and ROOM more.
    """

    def __init__(self, token_ids: Sequence[int], most: int) -> None:
        self._most, self._count = most, 0
        self._array = np.empty(0, dtype=np.int32)
        self.append(token_ids[-most:])

    @property
    def tokens(self) -> np.ndarray:
        """[n] int32, the newest last; a view, valid until the next `append`."""
        return self._array[: self._count]

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens."""
        end = self._count + len(token_ids)
        if end > self._array.size:
            kept = self.tokens[-self._most :]
            end = kept.size + len(token_ids)
            self._array = np.empty(end + min(kept.size, self._most) + ROOM, dtype=np.int32)
            self._array[: kept.size] = kept
            self._count = kept.size
        self._array[self._count : end] = token_ids
        self._count = end
