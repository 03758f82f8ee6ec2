"""Reads an answer in OpenAI's harmony format: messages, whose headers say what each is."""

from __future__ import annotations

import re
from collections.abc import Collection

from mllm_compile.text.calls.json_reader import nothing
from mllm_compile.text.calls.output import Output
from mllm_compile.text.calls.source import Marks, Reader, Source
from mllm_compile.text.calls.syntax import Channels

_MOST_HEADER = 256  # characters of a header that breaks off, and is not shown
_FUNCTION = re.compile(r"to=(?P<group>functions\.)?(?P<name>[^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def read_channels(source: Source, output: Output, syntax: Channels, tools: Collection[str]) -> Reader[None]:
    """Reads messages, each with a header; a text without one is content.

    Args:
        tools: names of those that may be called; for `functions` of another name the model's word is taken.
    """
    header_marks = Marks([syntax.message])
    heads = Marks([syntax.start, syntax.channel])
    ends = Marks([syntax.end, syntax.call, syntax.stop, syntax.start, syntax.channel])
    yield from source.skip_space()  # the prompt has begun the first header
    header = ["to="] if (yield from source.accept_exactly("to=")) else []
    while not output.is_done:
        if not header and not (yield from source.until(heads, output.content)):
            break
        if not (yield from source.until(header_marks, header.append)):
            if len("".join(header)) > _MOST_HEADER:
                output.content("".join(header))
            break
        source.take_to(source.at + len(syntax.message))
        yield from _read_message(source, output, "".join(header), ends, tools)
        mark = yield from source.until(ends, nothing)
        if mark in (syntax.end, syntax.call, syntax.stop):
            source.take_to(source.at + len(mark))
        header = []
    output.content_ends()


def _read_message(source: Source, output: Output, header: str, ends: Marks, tools: Collection[str]) -> Reader[None]:
    function, channel = _FUNCTION.search(header), _CHANNEL.search(header)
    if function and tools and (function["group"] or function["name"] in tools):
        output.start_call(function["name"], None)
        has_arguments = False

        def add(text: str) -> None:
            nonlocal has_arguments
            has_arguments = True
            output.arguments(text)

        yield from source.skip_space()
        mark = yield from source.until(ends, add)
        if not has_arguments:
            output.arguments("{}")
        output.end_call(is_whole=bool(mark))
    elif channel and channel[1] == "analysis":
        yield from source.until(ends, output.reasoning)
    else:
        yield from source.until(ends, output.content)
