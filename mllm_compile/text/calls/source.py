"""Text that comes in pieces, read as if it were there: the readers are generators that wait for more.

A reader's decision never depends on where the text was cut: it waits until it can tell, or the text has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from mllm_compile.text.calls.syntax import MORE, NO, SPACE, Literal

T = TypeVar("T")
Reader = Generator[None, None, T]  # each yield waits for more text

_MOST_HELD = 1 << 16  # characters of what may turn out to be no call


class NoCallError(Exception):
    """The text is not what a call looks like."""


class Marks:
    """Texts that are looked for together; the first to begin wins, of several that begin together the longest."""

    def __init__(self, texts: Iterable[str]) -> None:
        marks = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, marks)) if marks else r"(?!)")
        self._starts = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._first = frozenset(mark[0] for mark in marks)
        self._longest = len(marks[0]) if marks else 0

    def find(self, text: str, at: int, is_ended: bool) -> tuple[int, str]:
        """The start of a mark, and the mark; without a mark the end of what holds none, and nothing."""
        found = self._pattern.search(text, at)
        begin, mark = (found.start(), found[0]) if found else (len(text), "")
        if not is_ended:
            for start in range(max(at, len(text) - self._longest + 1), min(begin + 1, len(text))):
                if text[start] in self._first and text[start:] in self._starts:
                    return start, ""  # a mark that begins no later may still come
        return begin, mark


class Source:
    """The text that has come and is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self._held: list[str] | None = None
        self._num_held = 0

    def push(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def take_to(self, end: int) -> str:
        """Reads up to a place in `text`.

        Raises:
            NoCallError: more is held than may be.
        """
        begun = self.at
        if self._held is not None:
            end = min(end, begun + _MOST_HELD - self._num_held)
            self._num_held += end - begun
            self._held.append(self.text[begun:end])
        self.at = end
        if self._held is not None and self._num_held == _MOST_HELD:
            raise NoCallError
        return self.text[begun:end]

    def hold(self) -> None:
        """Keeps what is read from now on, in case that it is no call."""
        self._held, self._num_held = [], 0

    def let_go(self) -> str:
        """Ends holding: the text that was read since."""
        held, self._held = "".join(self._held or ()), None
        return held

    def peek(self) -> Reader[str]:
        """The next character, which stays; empty at the end."""
        while self.at == len(self.text) and not self.is_ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Reader[None]:
        while (character := (yield from self.peek())) and character in SPACE:
            self.take_to(self.at + 1)

    def end_of(self, literal: Literal) -> Reader[int]:
        """The place behind a literal that is next, or NO."""
        while (end := literal.end_in(self.text, self.at)) == MORE and not self.is_ended:
            yield
        return NO if end == MORE else end

    def accept(self, literal: Literal) -> Reader[bool]:
        """Reads a literal if it is next."""
        end = yield from self.end_of(literal)
        if end == NO:
            return False
        self.take_to(end)
        return True

    def expect(self, literal: Literal) -> Reader[None]:
        """
        Raises:
            NoCallError: the literal is not next.
        """
        if not (yield from self.accept(literal)):
            raise NoCallError

    def accept_exactly(self, text: str) -> Reader[bool]:
        """Reads a text if it is next, character by character."""
        while len(self.text) - self.at < len(text) and text.startswith(self.text[self.at :]) and not self.is_ended:
            yield
        if not self.text.startswith(text, self.at):
            return False
        self.take_to(self.at + len(text))
        return True

    def until(self, marks: Marks, out: Callable[[str], object]) -> Reader[str]:
        """Hands text out up to the first mark, which is returned and not read; empty at the end."""
        while True:
            end, mark = marks.find(self.text, self.at, self.is_ended)
            if end > self.at:
                out(self.take_to(end))
            if mark or self.is_ended:
                return mark
            yield

    def while_in(self, pattern: re.Pattern[str], most: int) -> Reader[str]:
        """Reads as far as the pattern, of single characters repeated, matches.

        Raises:
            NoCallError: that is more than `most` characters.
        """
        while True:
            found = pattern.match(self.text, self.at)
            end = found.end() if found else self.at
            if end - self.at > most:
                raise NoCallError
            if end < len(self.text) or self.is_ended:
                return self.take_to(end)
            yield
