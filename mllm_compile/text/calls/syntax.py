"""How a model writes tool calls and reasoning, as data: the parser reads by it, the constraint of a forced call is
made from it.

A literal here is text as a template writes it. The parser takes it as units (`Literal`): white space between units may
be more, less or missing, as models do not keep to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

SPACE = " \t\r\n"
_MOST_SPACE = 256  # between units
_UNIT = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|[^\s](?:(?![<\[\s]).)*")

NO, MORE = -1, -2  # of Literal.end_in


class Literal:
    """A text that is recognised whatever white space is ahead of its units."""

    def __init__(self, text: str) -> None:
        self.units: tuple[str, ...] = tuple(_UNIT.findall(text))

    def __bool__(self) -> bool:
        return bool(self.units)

    @property
    def first(self) -> str:
        return self.units[0]

    def end_in(self, text: str, at: int) -> int:
        """The place behind the literal in the text, NO, or MORE if the text is too short to tell."""
        for unit in self.units:
            begun = at
            while at < len(text) and text[at] in SPACE:
                at += 1
            if at - begun > _MOST_SPACE:
                return NO
            if not text.startswith(unit, at):
                return MORE if unit.startswith(text[at:]) else NO
            at += len(unit)
        return at


@dataclass(frozen=True)
class JsonObject:
    """A call is one JSON object, its keys in any order.

    Attributes:
        name, arguments, id: the keys that lead to each; id is None where a template writes none.
    """

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments",)
    id: tuple[str, ...] | None = None


@dataclass(frozen=True)
class NameThenJson:
    """A call is a name and then its arguments as JSON.

    Attributes:
        between: text ahead of the arguments.
        before_id: text between the name and an id behind it, or None.
        after_id: text between the name and an id ahead of it, or None.
        name_in_id: the id `functions.NAME:0` has both.
    """

    between: str
    before_id: str | None = None
    after_id: str | None = None
    name_in_id: bool = False


@dataclass(frozen=True)
class Parameters:
    """A call is a name and then its parameters one by one, each `begin` KEY `between` VALUE `end`.

    Attributes:
        after_name: text between the name and the first parameter.
        separator: text between parameters.
        between_json: `between` of a value that is JSON, where a string's is another one.
        are_python: values are literals of Python (or JSON), which end where those do; others are text up to `end`.
    """

    after_name: str
    begin: str
    between: str
    end: str
    separator: str = ""
    between_json: str | None = None
    are_python: bool = False


@dataclass(frozen=True)
class CallSyntax:
    """Calls in a text: `begin` (`call_begin` body `call_end`), with `separator` between them, `end`.

    Attributes:
        also_begin: texts that may be ahead of a call that otherwise has none.
    """

    body: JsonObject | NameThenJson | Parameters
    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    also_begin: tuple[str, ...] = ()

    @cached_property
    def opening(self) -> str:
        """The text that announces a call; empty if a call begins with its body."""
        return self.begin + self.call_begin

    @cached_property
    def is_marked(self) -> bool:
        """False if a call opens with nothing that plain answers do not have.

        Such a call is one only at the beginning of an answer, and only with the name of a tool.
        """
        return any(character.isalnum() for character in self.opening)

    def literals(self) -> Iterable[str]:
        """All its texts."""
        yield from (self.begin, self.end, self.call_begin, self.call_end, self.separator, *self.also_begin)
        body = self.body
        if isinstance(body, NameThenJson):
            yield from (body.between, body.before_id or "", body.after_id or "")
        elif isinstance(body, Parameters):
            yield from (body.after_name, body.begin, body.between, body.end, body.separator, body.between_json or "")


@dataclass(frozen=True)
class Channels:
    """A whole answer in OpenAI's harmony format: messages, each `header message text`, up to one of `ends`.

    The header names a channel, or a function that the text is arguments for.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    stop: str = "<|return|>"

    def literals(self) -> Iterable[str]:
        """All its texts."""
        yield from (self.start, self.channel, self.constrain, self.message, self.end, self.call, self.stop)


@dataclass(frozen=True)
class Reasoning:
    """Texts around a model's reasoning, which comes ahead of its answer."""

    begin: str
    end: str

    def is_opened_by(self, prompt: str) -> bool:
        """True if a prompt's end has begun the reasoning, so that the model's text starts within it."""
        return prompt.rstrip(SPACE).endswith(self.begin)

    def is_closed_by(self, prompt: str) -> bool:
        """True if a prompt's end has closed the reasoning: a template writes it so where thinking is switched off."""
        return prompt.rstrip(SPACE).endswith(self.end)


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's special tokens, sorted by their use to a syntax.

    Attributes:
        kept: those that the parser has to see: detokenize with `skip_special_tokens=False` if there are any.
        stripped: the others, which are then in the text too; the parser takes them out.
    """

    kept: frozenset[str]
    stripped: frozenset[str]


@dataclass(frozen=True)
class ChatSyntax:
    """All that is known of a model's chat format.

    Attributes:
        calls: how calls are written; None if that is not known.
        reasoning: texts around reasoning; None without reasoning, or if the calls' syntax has channels for it.
        origin: where `calls` is from: the template's own rendering, or the name of a known syntax.
        why_not: why `calls` is None.
        arguments_are_text: the template takes a call's arguments as JSON text, not as an object.
        ids_are_short: the template takes ids of nine letters and digits only.
        is_single: the template takes one call a message only.
    """

    calls: CallSyntax | Channels | None = None
    reasoning: Reasoning | None = None
    origin: str = ""
    why_not: str = ""
    arguments_are_text: bool = False
    ids_are_short: bool = False
    is_single: bool = False

    def special_tokens(self, tokens: Iterable[str]) -> SpecialTokens:
        """Sorts the texts of a tokenizer's special tokens."""
        own = [text for text in (self.calls.literals() if self.calls else ()) if text]
        own += [self.reasoning.begin, self.reasoning.end] if self.reasoning else []
        tokens = frozenset(tokens) - {""}
        kept = frozenset(token for token in tokens if any(token in text for text in own))
        return SpecialTokens(kept, tokens - kept if kept else frozenset())

    def described(self) -> str:
        """One line for a banner."""
        tools = f"recognised ({self.origin})" if self.calls else f"not recognised ({self.why_not})"
        if isinstance(self.calls, Channels):
            reasoning = "channels"
        else:
            reasoning = self.reasoning.begin if self.reasoning else "none"
        return f"tools: {tools}; reasoning: {reasoning}"
