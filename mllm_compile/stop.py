"""Stop strings over text that comes in pieces.

Text that could be the beginning of a stop string is held back until it is or is not one, so that a stream never shows
what the answer will not contain. How the text was cut into pieces does not change the outcome: the stop string that is
complete first wins, the longest of several that end together.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one completion's text.

    Args:
        stops: non-empty stop strings.
        include_in_output: leave the stop string that matched in the text.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)  # on equal ends the longest is found first
        self._include = include_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text.

        Returns:
            The text that can be shown now, and the stop string that ended the completion, if one did; what came after
            it is dropped.
        """
        if not text:
            return "", None
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, stop = match
            self._held = ""
            return text[: start + len(stop)] if self._include else text[:start], stop
        num_held = self._num_possible(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """The completion ended for another reason: what was held back belongs to the text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        best_end = len(text) + 1
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and start + len(stop) < best_end:
                best, best_end = (start, stop), start + len(stop)
        return best

    def _num_possible(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(len(self._stops[0]) - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
