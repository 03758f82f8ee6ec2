"""OpenAI's messages: a request's, made into what a chat template reads, and an answer's, made of a parser's events.

Clients send a call's arguments as JSON text; most templates take an object, which values.py makes. Ids are
made into ones that the template takes, the same for a call and its result. Reasoning goes out under two names,
`reasoning` and `reasoning_content`, as clients read either.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.text.calls.events import ArgumentsDelta, CallStart, ContentDelta, End, Event, ReasoningDelta
from mllm_compile.text.calls.syntax import CallSyntax, ChatSyntax, NameThenJson
from mllm_compile.text.calls.values import object_of

MAX_CALLS = 512  # of a message

_CALL = "{'id': …, 'type': 'function', 'function': {'name': …, 'arguments': JSON text}}"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def for_template(messages: Sequence[Any], syntax: ChatSyntax) -> list[Any]:
    """The messages for `ChatTemplate.render`, which refuses what is no message.

    Raises:
        RequestError: a call, or a result of one, is malformed.
    """
    normaliser = _Normaliser(syntax)
    return [normaliser.message(index, message) for index, message in enumerate(messages)]


class _Normaliser:
    """Goes through the messages of one request, in order."""

    def __init__(self, syntax: ChatSyntax) -> None:
        self._syntax = syntax
        calls = syntax.calls
        body = calls.body if isinstance(calls, CallSyntax) else None
        self._name_in_id = isinstance(body, NameThenJson) and body.name_in_id
        self._num_calls = 0
        self._calls: dict[str, tuple[str, str]] = {}  # a client's id → the template's, and the tool's name

    def message(self, index: int, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        where = f"messages: message {index}"
        if message.get("function_call") is not None:
            raise RequestError(f"{where} has a function_call; expected tool_calls, a list of {_CALL}.")
        if message.get("role") == "assistant" and message.get("tool_calls") is not None:
            return self._with_calls(where, message)
        if message.get("role") == "tool":
            return self._result(where, message)
        return message

    def _with_calls(self, where: str, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = message["tool_calls"]
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise RequestError(f"{where}: tool_calls are {typed_repr(calls)}; expected a list of {_CALL}.")
        if len(calls) > MAX_CALLS:
            raise RequestError(f"{where} has {len(calls)} tool_calls; expected at most {MAX_CALLS}. Shorten the chat.")
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        if rest.get("content") is None:
            rest["content"] = ""  # templates add to it
        if not calls:
            return rest
        return {**rest, "tool_calls": [self._call(f"{where}: call {at}", call) for at, call in enumerate(calls)]}

    def _call(self, where: str, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise RequestError(f"{where} is {typed_repr(call)}; expected {_CALL}.")
        name, given = function.get("name"), call.get("id")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}: its function's name is {short_repr(name)}; expected the name of a tool.")
        if given is not None and not isinstance(given, str):
            raise RequestError(f"{where}: its id is {typed_repr(given)}; expected a text.")
        arguments = self._arguments(f"{where} ({short_repr(name)})", function.get("arguments"))
        own = self._own_id(given, name)
        self._num_calls += 1
        if given is not None:
            self._calls[given] = own, name
        return {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _arguments(self, where: str, arguments: Any) -> Any:
        """Arguments as the template takes them; a text is kept as it is where that is a text."""
        if arguments is None or arguments in ("", "null"):
            arguments = {}
        if isinstance(arguments, Mapping):
            return json.dumps(arguments, ensure_ascii=False) if self._syntax.arguments_are_text else arguments
        if not isinstance(arguments, str):
            raise RequestError(f"{where}: its arguments are {typed_repr(arguments)}; expected an object as JSON text.")
        return arguments if self._syntax.arguments_are_text else object_of(arguments)

    def _own_id(self, given: str | None, name: str) -> str:
        if self._name_in_id and not (given and re.fullmatch(rf"functions\.{re.escape(name)}:\d+", given)):
            return f"functions.{name}:{self._num_calls}"
        own = given if given is not None else f"call_{self._num_calls}"
        return _shortened(own) if self._syntax.ids_are_short else own

    def _result(self, where: str, message: Mapping[str, Any]) -> dict[str, Any]:
        given = message.get("tool_call_id")
        if given is not None and not isinstance(given, str):
            raise RequestError(f"{where}: tool_call_id is {typed_repr(given)}; expected the id of a call, a text.")
        if message.get("content") is None:
            raise RequestError(f"{where}, of a tool, has no content; expected the call's result as a text.")
        if given is None:
            return dict(message)
        own, name = self._calls.get(given, (None, None))
        if own is None:
            own = _shortened(given) if self._syntax.ids_are_short else given
        return {**({"name": name} if name else {}), **message, "tool_call_id": own}


def _shortened(given: str) -> str:
    """An id of nine letters and digits: itself, or the same one for the same text."""
    if _SHORT_ID.fullmatch(given):
        return given
    return hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


# --- answers ---


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of one kind as one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            found[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == event.index:
            found[-1] = ArgumentsDelta(event.index, last.text + event.text)
        else:
            found.append(event)
    return found


def chunk_deltas(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The `delta` of each chunk, in order; none for ends. Neighbours of one kind are one chunk."""
    return [delta for event in joined(events) if (delta := _delta(event)) is not None]


def _delta(event: Event) -> dict[str, Any] | None:
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning": event.text, "reasoning_content": event.text}
    if isinstance(event, CallStart):
        return {"tool_calls": [{"index": event.index} | _call(event.id, event.name, "")]}
    if isinstance(event, ArgumentsDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def whole_message(events: Iterable[Event]) -> tuple[dict[str, Any], str]:
    """The message of an answer that is not streamed, and its `finish_reason`; the events end with an End."""
    content, reasoning, reason = [], [], ""
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            starts.append(event)
            arguments.append([])
        elif isinstance(event, ArgumentsDelta):
            arguments[event.index].append(event.text)
        elif isinstance(event, End):
            reason = event.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        message |= {"reasoning": "".join(reasoning), "reasoning_content": "".join(reasoning)}
    if starts:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            _call(start.id, start.name, "".join(parts)) for start, parts in zip(starts, arguments, strict=True)
        ]
    return message, reason


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
