"""Finds out from a model's chat template how the model writes calls and reasoning.

An answer with known calls is rendered; what is around their names and arguments is the syntax. It is taken only if
the parser reads by it what the template writes: one call, two, nested arguments, with text ahead. Otherwise, or if
calls open with nothing to tell them by, a known syntax is taken that the template's source has the texts of.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mllm_compile.errors import RequestError
from mllm_compile.text.calls.events import ArgumentsDelta, CallStart, ContentDelta, Event
from mllm_compile.text.calls.known import known_calls, known_reasoning
from mllm_compile.text.calls.parser import CallParser
from mllm_compile.text.calls.rendered_calls import FINDERS, Split, Wanted, common, split_around, units, with_end
from mllm_compile.text.calls.syntax import (
    SPACE,
    CallSyntax,
    Channels,
    ChatSyntax,
    Literal,
    NameThenJson,
    Parameters,
    Reasoning,
)
from mllm_compile.text.calls.tools import read_tools

_TAG_AHEAD = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*$")
_TAG_BEHIND = re.compile(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\])")
_MOST_RENDERED = 1 << 20  # characters: the probes are small, and what is much longer is no chat
_MOST_SECONDS = 10.0  # of renders that fail, together: refusals take milliseconds, one that does not end takes two

_PROBE = "zq"  # is in all that is given, and no template's own
_NAMES = ("zqfirst", "zqsecond")
_KEYS = ("zqkeya", "zqkeyb")
_ARGUMENTS = ({"zqkeya": "zqvala", "zqkeyb": "zqvalb"}, {"zqkeya": "zqvalc", "zqkeyb": "zqvald"})
_NUMBER = {"zqkeyf": 7071}
_NESTED = {"zqkeya": "a < b,\n  'c' \"d\"", "zqkeyc": {"e": [1, {"f": "g"}]}, "zqkeyd": [0.5, "h"], "zqkeye": True}
_PLAIN = _NESTED | {"zqkeya": "a < b, c"}  # templates of Python's look escape nothing
_TYPES = {
    "zqkeya": "string", "zqkeyb": "string", "zqkeyc": "object", "zqkeyd": "array", "zqkeye": "boolean",
    "zqkeyf": "integer",
}  # fmt: skip
_CONTENT, _REASONING = "Zqcontent", "Zqreasoning"
_IDS = (("call_zq0000000000000000000001", "call_zq0000000000000000000002"), ("zq0000001", "zq0000002"))
_WANTED = tuple(map(Wanted, _NAMES, _ARGUMENTS, zip(*_IDS, strict=True)))


def _tool(name: str) -> dict[str, Any]:
    properties: dict[str, dict[str, Any]] = {key: {"type": kind, "description": "One."} for key, kind in _TYPES.items()}
    properties["zqkeyc"]["additionalProperties"] = properties["zqkeyd"]["items"] = {"type": "string"}
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


_TOOLS = [_tool(name) for name in _NAMES]
_USER = {"role": "user", "content": "Zquestion"}


class Render(Protocol):
    """Renders chats as `ChatTemplate.render` does."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], /, *, tools: Any = None, add_generation_prompt: bool = True
    ) -> str: ...


def derive(render: Render, source: str) -> ChatSyntax:
    """The syntax of a model's chat template.

    Args:
        render: renders chats by the template; raises RequestError where that refuses.
        source: the template's Jinja source.

    Raises:
        MllmError: no process can be started that renders.
    """
    render = _limited(render)
    known = known_calls(source)
    is_channels = known is not None and isinstance(known.calls, Channels)
    reasoning = None if is_channels else _derive_reasoning(render) or known_reasoning(source)
    probes: list[_Probe] = []
    why_not = "the template writes no calls, and has the texts of no known syntax"
    for as_text, is_short in ((False, False), (True, False), (False, True), (True, True)):
        try:
            probe = _Probe(render, as_text, is_short, reasoning)
            probe.call_text = probe.answer([(_NAMES[0], _ARGUMENTS[0])])
        except RequestError as error:
            why_not = _reason(error)
            continue
        if as_text and any(other.is_for_objects for other in probes):
            continue
        probes.append(probe)
        calls = None if is_channels else probe.derived()
        if calls is not None and (calls.is_marked or known is None):
            return ChatSyntax(
                calls,
                reasoning,
                origin=f"by the template: {' '.join(calls.opening.split()) or 'no mark'}",
                arguments_are_text=as_text,
                ids_are_short=is_short,
                is_single=probe.is_single,
            )
    if any(probe.contradicts(known.calls) if known else _NAMES[0] in probe.call_text for probe in probes):
        known, why_not = None, "the template writes calls in a way that is not known"
    if known is None:
        return ChatSyntax(None, reasoning, why_not=why_not)
    try:
        render([_USER], tools=_TOOLS)
    except RequestError as error:
        return ChatSyntax(None, reasoning, why_not=_reason(error))
    syntax = ChatSyntax(known.calls, reasoning, origin=f"as {known.name}")
    likely = [probe for probe in probes if not probe.shows_python] or probes
    if not likely:
        return syntax
    as_text, is_short, is_single = likely[0].as_text, likely[0].is_short, likely[0].is_single
    return replace(syntax, arguments_are_text=as_text, ids_are_short=is_short, is_single=is_single)


def _limited(render: Render) -> Render:
    """Renders until failures have taken too long: a template may never end."""
    seconds = 0.0

    def limited(
        messages: Sequence[Mapping[str, Any]], /, *, tools: Any = None, add_generation_prompt: bool = True
    ) -> str:
        nonlocal seconds
        if seconds > _MOST_SECONDS:
            raise RequestError(f"the model's chat template took more than {_MOST_SECONDS:.0f} s to fail.")
        begun = time.monotonic()
        try:
            text = render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except RequestError:
            seconds += time.monotonic() - begun
            raise
        if len(text) > _MOST_RENDERED:
            raise RequestError(f"the model's chat template makes {len(text)} characters of a short chat.")
        return text

    return limited


def _derive_reasoning(render: Render) -> Reasoning | None:
    """The tags that the template writes around an answer's reasoning."""
    answer = {"role": "assistant", "content": _CONTENT}
    try:
        text = render([_USER, answer | {"reasoning_content": _REASONING}], add_generation_prompt=False)
        plain = render([_USER, answer], add_generation_prompt=False)
    except RequestError:
        return None
    if _REASONING not in text:
        return None
    ahead, _, behind = text.partition(_REASONING)
    begin, end = _TAG_AHEAD.search(ahead), _TAG_BEHIND.match(behind)
    without = _TAG_AHEAD.search(plain.partition(_CONTENT)[0])
    if not begin or not end or (without and without[1] == begin[1]):  # a header, which every answer has
        return None
    return Reasoning(begin[1], end[1])


@dataclass
class _Probe:
    """Renders answers with calls, and looks at the text.

    Attributes:
        as_text: arguments are JSON text, not objects.
        is_short: ids are of nine letters and digits.
        call_text: an answer with one call.
        is_single: the template refuses two calls.
    """

    render: Render
    as_text: bool
    is_short: bool
    reasoning: Reasoning | None
    call_text: str = ""
    is_single: bool = False

    def __post_init__(self) -> None:
        prompt = self.render([_USER], tools=_TOOLS)
        answer = {"role": "assistant", "content": _CONTENT}
        plain = self.render([_USER, answer], tools=_TOOLS, add_generation_prompt=False)
        ahead, _, self.end = plain.rpartition(_CONTENT)
        self.ahead = (units(prompt), units(ahead))  # some templates show tools in the one only, or think in the other

    @property
    def shows_python(self) -> bool:
        """True if arguments come out as Python shows a dict: the template is made for texts."""
        return f"{{'{_KEYS[0]}'" in self.call_text

    @property
    def is_for_objects(self) -> bool:
        """True if arguments came out in another way than a text of theirs: a text is not what the template expects."""
        return not self.as_text and not self.shows_python and all(part in self.call_text for part in _KEYS)

    def contradicts(self, calls: CallSyntax | Channels) -> bool:
        """True if the template writes calls that open as these do, and are others."""
        if isinstance(calls, Channels) or not calls.is_marked:
            return False
        is_python_of_texts = self.shows_python and not self.as_text
        return Literal(calls.opening).first in self.call_text and not is_python_of_texts and not self._reads_back(calls)

    def answer(self, calls: Sequence[tuple[str, Any]], content: str = "", name_in_id: bool = False) -> str:
        """The text that a model would have written for these calls.

        Raises:
            RequestError: the template refuses.
        """
        ids = _IDS[self.is_short]
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {
                    "id": f"functions.{name}:{index}" if name_in_id else ids[index],
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(given) if self.as_text else given},
                }
                for index, (name, given) in enumerate(calls)
            ],
        }
        text = self.render([_USER, message], tools=_TOOLS, add_generation_prompt=False)
        text = text[max(common(ahead, units(text)) for ahead in self.ahead) :]
        return text.rstrip(SPACE).removesuffix(self.end.strip(SPACE))

    def derived(self) -> CallSyntax | None:
        """The syntax, if the parser reads by it what the template writes."""
        one = self._without_reasoning(self.call_text)
        try:
            two = self._without_reasoning(self.answer([*zip(_NAMES, _ARGUMENTS, strict=True)]))
        except RequestError:
            two = None
        if two is None or (_NAMES[0] in two and _NAMES[1] not in two):  # refused, or left out
            two, self.is_single = None, True
        for find in FINDERS:
            syntax = self._syntax(find, one, two)
            if syntax is None or any(_PROBE in text for text in syntax.literals()):
                continue
            if self._reads_back(syntax):
                return syntax
        return None

    def _without_reasoning(self, text: str) -> str:
        """The answer behind an empty reasoning that some templates write."""
        name = text.find(_NAMES[0])
        end = text.rfind(self.reasoning.end, 0, max(name, 0)) if self.reasoning else -1
        if self.reasoning and end >= 0:
            text = text[end + len(self.reasoning.end) :]
        return text.strip(SPACE)

    def _syntax(self, find: Any, one: str, two: str | None) -> CallSyntax | None:
        call = find(one, 0, _WANTED[0])
        if call is None:
            return None
        if two is None:
            split = Split("", one[: call.begin], one[call.end :], "", "")
        else:
            first = find(two, 0, _WANTED[0])
            second = first and find(two, first.end, _WANTED[1])
            if second is None:
                return None
            split = split_around(two[: first.begin], two[first.end : second.begin], two[second.end :])
        body = call.body
        if isinstance(body, Parameters):
            body, end = with_end(body, one[call.end :])
            split = split._replace(call_end=split.call_end[len(end) :] if split.call_end.startswith(end) else "")
            body = self._with_numbers(body)
            if not body.are_python and not body.end.strip(SPACE):
                return None  # where a value ends cannot be told
        return CallSyntax(body, split.begin, split.end.rstrip(SPACE), split.call_begin, split.call_end, split.separator)

    def _with_numbers(self, body: Parameters) -> Parameters:
        """Parameters with the text ahead of a value that is JSON, where it is another one than a string's."""
        try:
            text = self.answer([(_NAMES[0], _NUMBER)])
        except RequestError:
            return body
        ((key, number),) = _NUMBER.items()
        between, found, _ = text.partition(key)[2].partition(str(number))
        if not found or between.strip(SPACE) == body.between.strip(SPACE) or body.are_python:
            return body
        return replace(body, between_json=between)

    def _reads_back(self, calls: CallSyntax) -> bool:
        syntax = ChatSyntax(calls, self.reasoning)
        body = calls.body
        is_python = isinstance(body, Parameters) and body.are_python
        nested = _PLAIN if is_python else _NESTED
        chats: list[tuple[list[tuple[str, Any]], str]] = [
            ([(_NAMES[0], _ARGUMENTS[0])], ""),
            ([(_NAMES[1], nested)], ""),
            ([(_NAMES[0], {})], ""),
        ]
        if not self.is_single:
            chats.append(([(_NAMES[0], _ARGUMENTS[0]), (_NAMES[1], nested)], ""))
        if calls.is_marked:
            chats.append(([(_NAMES[0], _ARGUMENTS[0])], _CONTENT))
        for given, content in chats:
            try:
                text = self.answer(given, content, isinstance(body, NameThenJson) and body.name_in_id)
            except RequestError:
                if content:  # some templates refuse text beside calls
                    continue
                return False
            found, said = read(syntax, text)
            if found != given or (said and not (content and said.startswith(content))):  # some drop it, or end its turn
                return False
        return True


def read(syntax: ChatSyntax, text: str) -> tuple[list[tuple[str, Any]], str]:
    """Names and arguments of the calls of a probe's answer, and its content."""
    parser = CallParser(syntax, read_tools(_TOOLS), make_id=str)
    events: list[Event] = [*parser.push(text), *parser.finish("stop")]
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, ArgumentsDelta):
            arguments[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    try:
        return [*zip(names, map(json.loads, arguments), strict=True)], content
    except ValueError:
        return [], content


def _reason(error: RequestError) -> str:
    """A refusal of `tools`, to be told behind that word and within a sentence."""
    return str(error).removeprefix("tools: ").rstrip(".")
