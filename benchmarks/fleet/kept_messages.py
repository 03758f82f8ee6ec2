"""A prefix cache of whole messages, where the real one has pages: the last used one goes last, from its end on."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class _Kept:
    """A message behind others, or its begin."""

    __slots__ = ("before", "behind", "tokens", "users")

    def __init__(self, before: int | None) -> None:
        self.before = before
        self.tokens = 0
        self.behind = 0  # messages right behind it
        self.users = 0  # those of them that are in use, and requests that it is the last message of


class KeptMessages:
    """
    Args:
        num_tokens: room of the cache and of requests together.

    Attributes:
        free: tokens that nobody has.
    """

    def __init__(self, num_tokens: int) -> None:
        self.free = num_tokens
        self._kept: dict[int, _Kept] = {}
        self._ends: OrderedDict[int, None] = OrderedDict()  # not in use, with none behind, by their last use
        self._unused = 0  # tokens of messages that are not in use

    @property
    def available(self) -> int:
        """Tokens that a request can get."""
        return self.free + self._unused

    def found(self, keys: Sequence[int], ends: Sequence[int]) -> tuple[int, int]:
        """How many of these messages are there, the last one maybe in part, and how many tokens that makes.

        Args:
            keys: the hash of each with those before it.
            ends: where each ends, behind a 0.
        """
        count = len(keys) - bisect_left(keys[::-1], True, key=self._kept.__contains__)
        return count, ends[count - 1] + self._kept[keys[count - 1]].tokens if count else 0

    def use(self, key: int) -> None:
        """Keeps a message and those before it until `leave`."""
        at: int | None = key
        self._ends.pop(key, None)
        while at is not None:
            kept = self._kept[at]
            kept.users += 1
            if kept.users > 1:
                return
            self._unused -= kept.tokens
            at = kept.before

    def leave(self, key: int) -> None:
        """Ends `use`."""
        at: int | None = key
        while at is not None:
            kept = self._kept[at]
            kept.users -= 1
            if kept.users:
                return
            self._unused += kept.tokens
            if not kept.behind:
                self._ends[at] = None
            at = kept.before

    def reserve(self, num_tokens: int) -> None:
        """Takes what is available away from the cache, for a request."""
        missing = num_tokens - self.free
        while missing > 0:
            key = next(iter(self._ends))
            kept = self._kept[key]
            gone = min(missing, kept.tokens)
            missing -= gone
            kept.tokens -= gone
            self.free += gone
            self._unused -= gone
            if not kept.tokens:
                self._drop(key, kept)
        self.free -= num_tokens

    def put(self, keys: Sequence[int], ends: Sequence[int], begin: int) -> int:
        """Keeps messages from the number `begin` on, with tokens that a request had reserved; how many these are.

        The message before is in use by that request; the last one is in its stead afterwards.
        """
        taken = 0
        for number in range(max(begin - 1, 0), len(keys)):  # the one before may be there in part
            key, size = keys[number], ends[number + 1] - ends[number]
            kept = self._kept.get(key)
            if kept is None:
                before = keys[number - 1] if number else None
                kept = self._kept[key] = _Kept(before)
                if before is not None:
                    self._kept[before].behind += 1
                    self._ends.pop(before, None)
            more = size - kept.tokens
            kept.tokens = size
            taken += more
            if not kept.users:
                self._unused += more
        self.use(keys[-1])
        if begin:
            self.leave(keys[begin - 1])
        return taken

    def _drop(self, key: int, kept: _Kept) -> None:
        del self._ends[key], self._kept[key]
        if kept.before is None:
            return
        before = self._kept[kept.before]
        before.behind -= 1
        if not before.behind and not before.users:
            self._ends[kept.before] = None
            self._ends.move_to_end(kept.before, last=False)
