"""Syntaxes of the templates, and what tests do with a parser."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache

from mllm_compile.text.calls.derive import derive
from mllm_compile.text.calls.events import ArgumentsDelta, CallEnd, CallStart, ContentDelta, End, ReasoningDelta
from mllm_compile.text.calls.messages import for_template, whole_message
from mllm_compile.text.calls.parser import CallParser
from mllm_compile.text.calls.tools import read_tools
from mllm_compile.text.chat_template import ChatTemplate
from tests.text.calls import templates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = [name for name in vars(templates) if name.isupper() and not name.startswith("_")]
# Templates that write a history's calls as the model is asked to write them.
SHOWING = [name for name in NAMES if name not in ("GRANITE3", "PHI4_MINI", "PLAIN")]
PYTHONIC = ("LLAMA32_PYTHONIC", "OLMO3")


def tool(name, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "One.", "parameters": parameters}}


TOOLS = [
    tool(
        "get_weather",
        ["city"],
        city={"type": "string"},
        days={"type": "integer"},
        at={"type": "number"},
        exact={"type": "boolean"},
        where={"type": "object"},
        tags={"type": "array"},
    ),
    tool("now"),
    tool("Paris-2", note={"type": "string"}),
]


@cache
def template(name):
    return ChatTemplate({"default": getattr(templates, name)}, TOKENS)


@cache
def syntax(name):
    return derive(template(name).render, template(name).source_for_tools)


def call(name, arguments, call_id=None):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id or "abcdefghi", "type": "function", "function": {"name": name, "arguments": text}}


def answer(name, calls=(), content="", reasoning=None):
    """The text that the template says its model has written, without the end of the turn."""
    user = {"role": "user", "content": "Q"}
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    tools = [one.definition for one in read_tools(TOOLS)]

    def rendered(last):
        return template(name).render(for_template([user, last], syntax(name)), tools=tools, add_generation_prompt=False)

    ahead, _, end = rendered({"role": "assistant", "content": "ZZZ"}).rpartition("ZZZ")
    text = rendered(message)
    for marker in (
        "<|im_start|>assistant\n",
        "<｜Assistant｜></think>",
        "<｜Assistant｜>",
        "<|assistant|>",
        "]~b]ai\n",
        "<|start|>assistant",
    ):
        if marker in text:
            return text[text.index(marker) + len(marker) :].removesuffix(end)
    shared = next((at for at, (a, b) in enumerate(zip(ahead, text, strict=False)) if a != b), len(ahead))
    return text[shared:].removesuffix(end)


@dataclass
class Read:
    """The result of a text."""

    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)  # id, name, arguments
    ends: list = field(default_factory=list)
    reason: str = ""


def events_of(parser, pieces, reason="stop"):
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish(reason)


def collect(events):
    """Joins events; that their order is right is checked on the way."""
    read, is_open = Read(), False
    for event in events:
        assert not read.reason, "nothing comes after the end"
        if isinstance(event, ContentDelta | ReasoningDelta):
            assert event.text and not is_open
            if isinstance(event, ContentDelta):
                read.content += event.text
            else:
                read.reasoning += event.text
        elif isinstance(event, CallStart):
            assert not is_open and event.index == len(read.calls)
            is_open = True
            read.calls.append((event.id, event.name, ""))
        elif isinstance(event, ArgumentsDelta):
            assert is_open and event.text and event.index == len(read.calls) - 1
            call_id, name, arguments = read.calls[-1]
            read.calls[-1] = (call_id, name, arguments + event.text)
        elif isinstance(event, CallEnd):
            assert is_open and event.index == len(read.calls) - 1
            is_open = False
            read.ends.append(event.is_whole)
        elif isinstance(event, End):
            read.reason = event.finish_reason
    assert not is_open and read.reason
    message, reason = whole_message(events)
    assert (message["content"] or "", reason) == (read.content, read.reason)
    return read


def read(name_or_syntax, *pieces, tools=TOOLS, reason="stop", **options):
    known = syntax(name_or_syntax) if isinstance(name_or_syntax, str) else name_or_syntax
    ids = iter(range(10_000))
    parser = CallParser(known, read_tools(tools), make_id=lambda: f"id{next(ids)}", **options)
    return collect(events_of(parser, pieces, reason))


def named(result):
    """Names and arguments of calls."""
    return [(name, json.loads(arguments)) for _, name, arguments in result.calls]
