"""A parser's events in OpenAI's shapes: the deltas of `chat.completion.chunk`s, and a whole message.

Reasoning goes out under two names, `reasoning` and `reasoning_content`, as clients read either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mllm_compile.text.calls.events import ArgumentsDelta, CallStart, ContentDelta, End, Event, ReasoningDelta


def chunk_deltas(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The `delta` of each chunk, in order; none for ends. Neighbours of one kind are one chunk."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == event.index:
            joined[-1] = ArgumentsDelta(event.index, last.text + event.text)
        else:
            joined.append(event)
    return [delta for event in joined if (delta := _delta(event)) is not None]


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
