"""Stop texts in a text that comes in pieces.

Text that could begin a stop text is held back until that is decided, so that a stream never shows text that the answer
will not contain. The cuts between pieces do not change the outcome: the stop text that is complete first wins, the
longest of several that end together.

The engine's thread does this for every token, so its cost is per new character, for any stop texts. They are one
automaton (Aho and Corasick 1975), and no character is looked at twice.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

_KEPT = 8  # automatons; of the largest stop texts that SamplingParams takes, one is about a megabyte


class _Automaton:
    """All stop texts at once. A state is the longest end of the text so far that begins a stop text; 0 is the empty
    one.

    Attributes:
        next: for each state, the state after a character that goes on.
        shorter: for each state, the next longest such end; any other character goes on from it.
        length: for each state, its length in characters.
        found: for each state, the longest stop text that is complete there.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.length = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self.shorter = [0] * len(self.next)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for length, character in enumerate(stop, start=1):
            following = self.next[state].get(character)
            if following is None:
                following = self.next[state][character] = len(self.next)
                self.next.append({})
                self.length.append(length)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Sets `shorter`, shortest states first, and what is found in a state by its shorter ends."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self.next[state].items():
                self.shorter[following] = self.after(self.shorter[state], character)
                queue.append(following)
            if self.found[state] is None:
                self.found[state] = self.found[self.shorter[state]]

    def after(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self.next[state]:
            state = self.shorter[state]
        return self.next[state].get(character, 0)


_automaton = lru_cache(_KEPT)(_Automaton)  # completions of a prompt share one, and prompts with the same stop texts


class StopMatcher:
    """Watches one completion's text.

    Args:
        stops: non-empty stop texts.
        include_in_output: leave the stop text that matched in the text.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._automaton = _automaton(stops)
        self._include = include_in_output
        self._state = 0
        self._held = ""  # the end of the text that is the state

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text.

        Returns:
            The text that can be shown now, and the stop text that ended the completion, or None; later text is dropped.
        """
        automaton, state = self._automaton, self._state
        for position, character in enumerate(text, start=1):
            state = automaton.after(state, character)
            stop = automaton.found[state]
            if stop is not None:
                whole = self.flush() + text[:position]
                return (whole if self._include else whole[: -len(stop)]), stop
        whole = self._held + text
        num_shown = len(whole) - automaton.length[state]
        self._state, self._held = state, whole[num_shown:]
        return whole[:num_shown], None

    def flush(self) -> str:
        """Ends the completion for another reason: the text that was held back."""
        held, self._held, self._state = self._held, "", 0
        return held
