"""How long steps take, by their decodes and by the tokens that are drafted for these.

A step's time is from the end of the one before to its own. So what the host does between two steps counts, where the
device waits for it, and the making of drafts too. Steps of about the same size share a time, the median of the newest.
Where steps of so many requests are new, steps of more requests tell how much longer drafts make one at most. Free
of torch. Times are in ms.

Shape legend: N numbers of drafted tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_KEPT = 5  # newest times of a size
_LEAST = 2  # of a size that is known: something may be loaded or compiled for the first
_FORGOTTEN_AFTER = 1024  # steps: what was slow once may be fast now
_LEAST_MS = 1e-3  # of a step that a clock saw end as it began
_FIRST_DRAFTED = 2  # tokens, or one for each decode: most of the first step with drafts
_PLAIN = -1  # the size of steps without drafts, of which the host plans the next while one runs


class StepTimes:
    """The times of steps without prompts.

    Args:
        waits: as KnownTimes has it.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._sizes: dict[int, dict[int, _Times]] = {}  # of decodes, then of drafted tokens
        self._count = 0  # steps that were taken in

    def learn(self, num_decodes: int, num_drafted: int | None, ms: float) -> None:
        """Takes a step in.

        Args:
            num_drafted: drafted tokens of all its decodes; None: it was planned ahead, as steps without drafts are.
        """
        self._count += 1
        ms = max(ms, _LEAST_MS)
        sizes = self._sizes.setdefault(_size(num_decodes), {})
        times = sizes.setdefault(_PLAIN if num_drafted is None else _size(num_drafted), _Times())
        times.add(ms, (num_drafted or 0) / num_decodes, self._count)

    def plain_ms(self, num_decodes: int) -> float | None:
        """The time of a step without drafts, with so many decodes or the next larger number that is known."""
        return next((known[_PLAIN].median for known in self._with_plain(_size(num_decodes))), None)

    def of(self, num_decodes: int) -> KnownTimes:
        """The times of steps with so many decodes."""
        size = _size(num_decodes)
        by_drafted = {of: times.median for of, times in self._known(size).items()}
        own_ms = by_drafted.pop(_PLAIN, None)
        others = next(self._with_plain(size + 1), None)
        if others is None:
            return KnownTimes(num_decodes, own_ms, by_drafted, self._waits)
        others_ms = others.pop(_PLAIN).median
        plain_ms = others_ms if own_ms is None else own_ms
        for times in others.values():
            drafted = _size(round(times.drafted_each * num_decodes))
            by_drafted.setdefault(drafted, times.median * plain_ms / others_ms)
        return KnownTimes(num_decodes, plain_ms, by_drafted, self._waits)

    def _with_plain(self, least: int) -> Iterator[dict[int, _Times]]:
        """The known times of each size of decodes from this one on, where steps without drafts are among them."""
        for size in sorted(size for size in self._sizes if size >= least):
            known = self._known(size)
            if _PLAIN in known:
                yield known

    def _known(self, size: int) -> dict[int, _Times]:
        """The times of steps with decodes of a size, by drafted tokens; old ones are forgotten."""
        sizes = self._sizes.get(size, {})
        for old in [of for of, times in sizes.items() if times.last < self._count - _FORGOTTEN_AFTER]:
            del sizes[old]
        return {of: times for of, times in sizes.items() if len(times.newest) >= _LEAST}


@dataclass(frozen=True, slots=True, eq=False)
class KnownTimes:
    """The times of steps of about as many decodes.

    Attributes:
        plain_ms: of a step without drafts; None: not known.
        by_drafted: of others, by the drafted tokens of all their decodes.
        waits: others wait for the host, and those without drafts do not. So what a token costs is told by others alone.
    """

    num_decodes: int
    plain_ms: float | None
    by_drafted: dict[int, float]
    waits: bool

    @property
    def most_drafted(self) -> int:
        """Tokens that may be drafted in a step: at most twice what is known, so that nothing unknown costs much."""
        return max(_FIRST_DRAFTED, self.num_decodes, 2 * max(self.by_drafted, default=0))

    def knows(self, num_drafted: int) -> bool:
        """True if the time of so many drafted tokens is known."""
        return _size(num_drafted) in self.by_drafted

    def verify_ms(self, num_drafted: np.ndarray) -> np.ndarray:
        """Times [N] of steps in which so many tokens [N] are drafted; as if they were free where nothing is known."""
        sizes = sorted(self.by_drafted)
        seen = [self.by_drafted[size] for size in sizes]
        begin = 0
        if not sizes or sizes[0] > 0:
            sizes, seen, begin = [0, *sizes], [self.plain_ms or 0.0, *seen], int(self.waits and bool(sizes))
        times = np.maximum.accumulate(seen)
        slope = (times[-1] - times[begin]) / max(sizes[-1] - sizes[begin], 1)
        beyond = slope * np.maximum(num_drafted - sizes[-1], 0)
        found: np.ndarray = np.interp(num_drafted, sizes, times)
        found += beyond
        return found


class _Times:
    """The newest times of a size."""

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=_KEPT)
        self.drafted_each = 0.0  # tokens of each decode, of the last one
        self.last = 0  # when one was added

    def add(self, ms: float, drafted_each: float, now: int) -> None:
        self.newest.append(ms)
        self.drafted_each, self.last = drafted_each, now

    @property
    def median(self) -> float:
        """The lower one of two."""
        return sorted(self.newest)[(len(self.newest) - 1) // 2]


def _size(count: int) -> int:
    """The count rounded down to two binary digits: 0, 1, 2, 3, 4, 6, 8, 12, …"""
    shift = max(count.bit_length() - 2, 0)
    return count >> shift << shift
