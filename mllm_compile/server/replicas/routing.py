"""The choice of a request's engine among several: where its prefix is cached, unless others have much less to do.

What an engine has cached is known from what was sent to it. A prefix is the blocks of a request's text that are whole,
each hashed with the one before it. An engine's blocks are forgotten in the order of their last use, the later ones of a
text first: so those that are known of a text are always its first ones.

A text that goes on from an earlier one goes home. One that only begins as others do, by a system's prompt, would find
what they have in common on the engine of the first of them, and so would all: sessions pause, and that engine is idle
whenever the next one begins. So for these an engine's choices of late count beside its requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

BLOCK = 512  # bytes of a text: about two pages of 64 tokens
_MOST_BLOCKS = 4096  # of a request that are looked at: 2 MiB
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


def blocks_of(*texts: bytes) -> list[int]:
    """The hash of each block of a request's texts, chained."""
    text = b"\0".join(texts)[: _MOST_BLOCKS * BLOCK]
    blocks: list[int] = []
    chain = 0
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        chain = hash((chain, text[start : start + BLOCK]))
        blocks.append(chain)
    return blocks


class _Known:
    """The front's knowledge of one engine."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, bool] = OrderedDict()  # True: a text ended with it
        self.most_blocks = _MOST_BLOCKS
        self.has_tiers = False
        self.load = 0
        self.chosen = 0  # the number of the last choice of it
        self._late = 0.0  # at that choice

    def matched(self, last_first: Sequence[int]) -> int:
        """The number of a text's blocks that it has cached, from the text's begin on.

        Args:
            last_first: the blocks, the last one first.
        """
        # A method of the dict's own: with many engines and long prompts a function in Python is most of a choice.
        return len(last_first) - bisect_left(last_first, True, key=self.blocks.__contains__)

    def goes_on(self, last_first: Sequence[int], num_matched: int) -> bool:
        """True if the blocks that it has of a text are all of an earlier one."""
        return num_matched > 0 and self.blocks[last_first[-num_matched]]

    def late(self, number: int, kept: float) -> float:
        """Choices of it of late, ahead of the choice of this number; each further choice keeps a part of them."""
        return self._late * kept ** (number - self.chosen)

    def note_choice(self, number: int, kept: float) -> None:
        """Notes that it was chosen."""
        self._late, self.chosen = self.late(number, kept) + 1, number

    def take(self, last_first: Sequence[int], num_matched: int) -> None:
        """Has a text's blocks from now on; it had `num_matched` of them."""
        num_new = len(last_first) - num_matched
        self.blocks.update(dict.fromkeys(last_first[:num_new], False))
        if last_first:
            self.blocks[last_first[0]] = True
        deque(map(self.blocks.move_to_end, last_first[num_new:]), maxlen=0)
        while len(self.blocks) > self.most_blocks:
            self.blocks.popitem(last=False)


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
        known.blocks.clear()
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
        self, usable: Collection[str], blocks: Sequence[int] = (), session: str | None = None, hint: str | None = None
    ) -> str:
        """The engine that a request goes to, which then has its prefix.

        Args:
            usable: engines that take requests; not empty.
            blocks: as `blocks_of` makes them.
            session: it stays with its engine for as long as that is usable and has the prefix. Engines whose caches
                are full would keep those that they cannot hold, while others have room.
            hint: likewise, unless that engine has much more to do.
        """
        known = {name: self._known[name] for name in usable}
        last_first = blocks[::-1]
        matched = {name: one.matched(last_first) for name, one in known.items()}
        homes, name = (self._hints, hint or "") if session is None else (self._sessions, session)
        home = homes.get(name, "")
        stays = home in known and (known[home].has_tiers or matched[home] >= _WORTH * len(blocks))
        if not stays or (session is None and self._is_overloaded(home, known)):
            home = self._by_prefix(known, matched, last_first)
        if name:
            _note(homes, name, home)
        self._count += 1
        known[home].note_choice(self._count, self._kept)
        known[home].take(last_first, matched[home])
        return home

    @property
    def _kept(self) -> float:
        return 1 - 1 / (_LATE * max(1, len(self._known)))

    def _by_prefix(self, known: Mapping[str, _Known], matched: Mapping[str, int], last_first: Sequence[int]) -> str:
        kept, number = self._kept, self._count + 1
        late = {name: one.late(number, kept) for name, one in known.items()}
        best = max(known, key=lambda name: (matched[name], -known[name].load, -late[name]))
        least = min(known, key=lambda name: (known[name].load, late[name]))
        saved = matched[best] - matched[least]
        ahead = known[best].load - known[least].load + (late[best] - late[least]) / _LATE_A_REQUEST
        is_worth = matched[best] > 0 and matched[best] >= _WORTH * len(last_first)
        if not known[best].goes_on(last_first, matched[best]):
            is_worth = is_worth and saved >= _REQUEST_BLOCKS * ahead
        return best if is_worth and not self._is_overloaded(best, known) else least

    @staticmethod
    def _is_overloaded(name: str, known: Mapping[str, _Known]) -> bool:
        least = min(one.load for one in known.values())
        return known[name].load > max(least + AHEAD, least * TIMES)


def _note(homes: OrderedDict[str, str], name: str, home: str) -> None:
    homes[name] = home
    homes.move_to_end(name)
    if len(homes) > _MOST_SESSIONS:
        homes.popitem(last=False)
