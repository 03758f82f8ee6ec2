"""The choice of a request's engine among several: where its prefix is cached, unless others have much less to do.

What an engine has cached is known from what was sent to it, by blocks of texts (text.py). An engine's texts are
forgotten in the order of their last use, each from its end on: so those blocks that are known of a text are always its
first ones.

A text that goes on from an earlier one, its tail included, goes home. One that only begins as others do, by a system's
prompt, would find what they have in common on the engine of the first of them, and so would all: sessions pause, and
that engine is idle whenever the next one begins. So for these an engine's choices of late count beside its requests.

Of engines with as few requests a text without a home gets the one whose next block to be forgotten is the oldest: there
it displaces what is least likely to be asked for again. A text shorter than a block gets the one asked least of late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from math import inf
from operator import or_

from mllm_compile.server.replicas.text import BLOCK, MOST_BLOCKS, Text

TOKEN_BYTES = 4  # of text that a token stands for, at about the least of prose and code
_MOST_SESSIONS = 1 << 16
# An engine has much more to do where both hold of its requests beside those of the one that has least.
AHEAD = 8
TIMES = 1.5
# What many texts begin with would gather them on the first engine that has it. So a new text goes there where it saves
# so many blocks, about 4,000 tokens, for each request that the engine has more than another.
_REQUEST_BLOCKS = 32
# Sessions that pause come back: so many choices of late count as a request that an engine has. Of late are about the
# last _LATE for each engine.
_LATE_A_REQUEST = 4
_LATE = 16
# Of a text's blocks, so many are worth its going to where they are.
_WORTH = 0.5
_NO_TEXT = Text()


class _Block:
    """A block that an engine has, or the tail of a text, which is one by itself."""

    __slots__ = ("before", "behind", "tails")

    def __init__(self, before: int | None) -> None:
        self.before = before  # the block before it
        self.behind = 0  # how many are right behind it
        self.tails = 0  # a bit for each length of a tail that was right behind it


class _Known:
    """The front's knowledge of one engine."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self._last: OrderedDict[int, int] = OrderedDict()  # those with none behind, by the choice that used them last
        self.most_blocks = MOST_BLOCKS
        self.has_tiers = False
        self.load = 0
        self.chosen = 0  # the number of the last choice of it
        self._late = 0.0  # at that choice

    def clear(self) -> None:
        """Has no blocks."""
        self.blocks.clear()
        self._last.clear()

    def matched(self, last_first: Sequence[int]) -> int:
        """The number of a text's blocks that it has cached, from the text's begin on.

        Args:
            last_first: the blocks, the last one first.
        """
        # A method of the dict's own: with many engines and long prompts a function in Python is most of a choice.
        return len(last_first) - bisect_left(last_first, True, key=self.blocks.__contains__)

    def late(self, number: int, kept: float) -> float:
        """Choices of it of late, ahead of the choice of this number; each further choice keeps a part of them."""
        return self._late * kept ** (number - self.chosen)

    def note_choice(self, number: int, kept: float) -> None:
        """Notes that it was chosen."""
        self._late, self.chosen = self.late(number, kept) + 1, number

    def age(self, number: int) -> float:
        """Choices since the block was used that would be forgotten next; inf: there is room."""
        if len(self.blocks) < self.most_blocks or not self._last:
            return inf
        return number - next(iter(self._last.values()))

    def take(self, text: Text, last_first: Sequence[int], number: int) -> None:
        """Has a text's blocks from now on, by the choice of this number."""
        num_blocks, tail = len(last_first), text.tail_bytes
        if not num_blocks:
            return
        for place in range(self.matched(last_first), num_blocks):
            self._put(text.blocks[place], text.blocks[place - 1] if place else None, number)
        last = self.blocks[last_first[0]]
        last.tails |= 1 << tail
        end = text.hash_to(num_blocks, tail)
        if end not in self.blocks:
            self._put(end, last_first[0], number)
        if end in self._last:
            self._last[end] = number
            self._last.move_to_end(end)
        while len(self.blocks) > self.most_blocks:
            self._forget_one()

    def _put(self, name: int, before: int | None, number: int) -> None:
        self.blocks[name] = _Block(before)
        self._last[name] = number
        if before is not None:
            self._last.pop(before, None)
            self.blocks[before].behind += 1

    def _forget_one(self) -> None:
        """Forgets a block with none behind, the least recently used; the one before it is the next then."""
        name, number = self._last.popitem(last=False)
        before = self.blocks.pop(name).before
        if before is None:
            return
        block = self.blocks[before]
        block.behind -= 1
        if not block.behind:
            self._last[before] = number
            self._last.move_to_end(before, last=False)


class Routing:
    """The choice of engines.

    Args:
        names: of the engines.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._known = {name: _Known() for name in names}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._hints: OrderedDict[str, str] = OrderedDict()
        self._count = 0

    @property
    def loads(self) -> Mapping[str, int]:
        """Requests that each engine has."""
        return {name: known.load for name, known in self._known.items()}

    def started(self, name: str, kv_tokens: int, has_tiers: bool = False) -> None:
        """An engine is ready with an empty cache of so many tokens.

        Args:
            has_tiers: what leaves its cache goes to the host's memory; how much stays there is not known here.
        """
        known = self._known[name]
        known.clear()
        known.has_tiers = has_tiers
        known.most_blocks = max(1, kv_tokens * TOKEN_BYTES // BLOCK)

    def have(self, names: Collection[str]) -> None:
        """Knows these engines from now on and no others, whose sessions go elsewhere."""
        self._known = {name: self._known.get(name) or _Known() for name in names}

    @contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """Counts a request for as long as an engine has it."""
        known = self._known[name]  # which may be gone, or known anew, when the request ends
        known.load += 1
        try:
            yield
        finally:
            known.load -= 1

    def home_of(self, session: str) -> str | None:
        """The engine of a session; None: it has none."""
        return self._sessions.get(session)

    def choose(
        self, usable: Collection[str], text: Text = _NO_TEXT, session: str | None = None, hint: str | None = None
    ) -> str:
        """The engine that a request goes to, which then has its prefix.

        Args:
            usable: engines that take requests; not empty.
            session: it stays with its engine for as long as that is usable and has the prefix. Engines whose caches
                are full would keep those that they cannot hold, while others have room.
            hint: likewise, unless that engine has much more to do.
        """
        known = {name: self._known[name] for name in usable}
        last_first = text.blocks[::-1]
        homes, name = (self._hints, hint or "") if session is None else (self._sessions, session)
        home = homes.get(name, "")
        stays = home in known and (known[home].has_tiers or known[home].matched(last_first) >= _WORTH * len(last_first))
        if not stays or (session is None and _is_overloaded(known[home], min(one.load for one in known.values()))):
            home = self._by_prefix(known, text, last_first)
        if name:
            _note(homes, name, home)
        self._count += 1
        known[home].note_choice(self._count, self._kept)
        known[home].take(text, last_first, self._count)
        return home

    @property
    def _kept(self) -> float:
        return 1 - 1 / (_LATE * max(1, len(self._known)))

    def _by_prefix(self, known: Mapping[str, _Known], text: Text, last_first: Sequence[int]) -> str:
        most = 0
        for one in known.values():  # few engines have more than all that were looked at before
            if most < len(text.blocks) and text.blocks[most] in one.blocks:
                most = one.matched(last_first)
        having = {name: one.blocks for name, one in known.items() if not most or text.blocks[most - 1] in one.blocks}
        kept, number = self._kept, self._count + 1
        late = {name: one.late(number, kept) for name, one in known.items()}
        homes = _homes_of(text, most, having) if most else []
        best = min(homes or having, key=lambda name: (known[name].load, late[name]))
        fewest = min(one.load for one in known.values())
        is_worth = most > 0 and most >= _WORTH * len(last_first) and not _is_overloaded(known[best], fewest)
        if is_worth and homes:
            return best
        idle = [name for name, one in known.items() if one.load == fewest]
        # A text without a block displaces nothing that is known of.
        ages = {name: known[name].age(number) if text.blocks else inf for name in idle}
        least = min(idle, key=lambda name: (-ages[name], late[name]))
        saved = most - known[least].matched(last_first)
        ahead = known[best].load - fewest + (late[best] - late[least]) / _LATE_A_REQUEST
        return best if is_worth and saved >= _REQUEST_BLOCKS * ahead else least


def _is_overloaded(engine: _Known, fewest: int) -> bool:
    """True if an engine has much more to do than the one with the fewest requests."""
    return engine.load > max(fewest + AHEAD, fewest * TIMES)


def _homes_of(text: Text, num_matched: int, having: Mapping[str, Mapping[int, _Block]]) -> list[str]:
    """The engines that had an earlier text which this one begins with all of; of several such texts the longest counts.

    Args:
        having: the blocks of engines that have so many of the text's.
    """
    last = text.blocks[num_matched - 1]
    tails = {name: blocks[last].tails for name, blocks in having.items()}
    lengths = reduce(or_, tails.values())
    while lengths:
        length = lengths.bit_length() - 1
        end = text.hash_to(num_matched, length)
        homes = [name for name, blocks in having.items() if tails[name] >> length & 1 and end in blocks]
        if homes:
            return homes
        lengths -= 1 << length
    return []


def _note(homes: OrderedDict[str, str], name: str, home: str) -> None:
    homes[name] = home
    homes.move_to_end(name)
    if len(homes) > _MOST_SESSIONS:
        homes.popitem(last=False)
