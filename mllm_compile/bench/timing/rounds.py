"""Repeats what is timed, several ways by turns, and says how far the times are apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Way = TypeVar("Way")
Taken = TypeVar("Taken")
Take = Callable[[], float]

_STABLE = 0.01  # of the median, between the two halves of the times


def repeated(take: Take, repeats: int, warm_ups: int = 1) -> list[float]:
    """The results of `take`, without the first few."""
    return [take() for _ in range(warm_ups + repeats)][warm_ups:]


def by_turns(
    takes: Mapping[Way, Callable[[], Taken]], repeats: int, warm_ups: int = 1, swapped: bool = False
) -> dict[Way, list[Taken]]:
    """The times of several ways, or whatever else they give, which take turns, so that drift hits all alike.

    Args:
        warm_ups: rounds whose times do not count.
        swapped: turn the order around in every second round, so that none is always behind the same one.
    """
    taken: dict[Way, list[Taken]] = {way: [] for way in takes}
    for index in range(warm_ups + repeats):
        order = list(takes)
        for way in reversed(order) if swapped and index % 2 else order:
            found = takes[way]()
            if index >= warm_ups:
                taken[way].append(found)
    return taken


def until_stable(take: Take, least: int, most: int) -> list[float]:
    """Times until the medians of their earlier and later half are within 1 % of each other.

    Args:
        least: so many are taken at any rate.
        most: after so many it ends all the same.
    """
    times = [take() for _ in range(least)]
    while len(times) < most and not _is_stable(times):
        times.append(take())
    return times


def _is_stable(times: Sequence[float]) -> bool:
    half = len(times) // 2
    if not half:
        return False
    earlier, later = statistics.median(times[:half]), statistics.median(times[half:])
    return abs(earlier - later) <= _STABLE * min(earlier, later)


def spread(times: Sequence[float], median: float | None = None) -> float:
    """(largest − smallest) / median; 0 of none.

    Args:
        median: where it is not the times' median.
    """
    if not times:
        return 0.0
    middle = statistics.median(times) if median is None else median
    return (max(times) - min(times)) / middle if middle else 0.0


def quantile(times: Sequence[float], share: float) -> float:
    """The smallest time that so large a share of all does not exceed: 1 is the largest."""
    return sorted(times)[max(0, math.ceil(share * len(times)) - 1)]


def with_range(times: Sequence[float], digits: int, unit: str = "") -> str:
    """The median, and in brackets the least and the most."""
    least, median, most = (f"{value:.{digits}f}" for value in (min(times), statistics.median(times), max(times)))
    return f"{median}{unit} ({least} to {most})"
