"""The grammar of answers that must call a tool, as a structural tag: the plain dict that xgrammar reads, and vLLM's
`structured_outputs`. Made of a model's own syntax and the schemas of the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.text.calls.syntax import (
    SPACE,
    CallSyntax,
    Channels,
    ChatSyntax,
    JsonObject,
    Literal,
    Parameters,
    Reasoning,
)
from mllm_compile.text.calls.tools import Tool, ToolChoice
from mllm_compile.text.calls.values import allows_text_only

TagFormat = dict[str, Any]
SpecialIds = Mapping[str, int | None]  # text of a special token → its id; None: it ends an answer

_SPACE = {"type": "regex", "pattern": r"[ \n]{0,4}"}  # that models write around reasoning
_SHORT_ID = {"type": "regex", "pattern": "[A-Za-z0-9]{9}"}  # as the models that write one were trained to
_LONG_ID = {"type": "regex", "pattern": "[A-Za-z0-9_-]{1,40}"}
_QUOTE = '"'
_ANY = {"type": "any_text"}
_ANY_OBJECT = {"type": "object"}
_STRICT_IF_CHOSEN = (
    "tools: strict is possible with tool_choice 'required' or a named one only, as nothing tells this model's calls "
    "from its other answers. Leave strict out, or choose so."
)
_ALLOWED_IF_CHOSEN = (
    "tool_choice: allowed_tools is possible with mode 'required' only, as nothing tells this model's calls from its "
    "other answers. Offer these tools alone, or require a call."
)


def structural_tag(
    syntax: ChatSyntax,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    is_parallel: bool = True,
    reasoning_is_open: bool = False,
    may_reason: bool = True,
    special_tokens: SpecialIds | None = None,
) -> TagFormat | None:
    """The structural tag that an answer is held to; None if it may be anything.

    An answer with `auto` is held to the schemas of strict tools and to the tools that are allowed, where it calls one.
    With `required` it is calls alone, behind reasoning if the model writes some.

    Args:
        is_parallel: there may be several calls.
        reasoning_is_open: the prompt's end has begun the reasoning.
        may_reason: calls may have reasoning ahead of them; where it is switched off they have none that is not open.
        special_tokens: the marks of the syntax that are special tokens, which the tag then names by their ids.

    Raises:
        RequestError: the model's syntax is not known, or not one that allows this.
    """
    reasoning = syntax.reasoning if may_reason or reasoning_is_open else None
    ahead = _ahead(reasoning, reasoning_is_open)
    written = _written(syntax, tools, choice, is_parallel, ahead, may_reason, special_tokens or {})
    if written is None:
        return None
    return {"type": "structural_tag", "format": _by_ids(written, special_tokens) if special_tokens else written}


def _written(
    syntax: ChatSyntax,
    tools: Sequence[Tool],
    choice: ToolChoice,
    is_parallel: bool,
    ahead: list[TagFormat],
    may_reason: bool,
    special_tokens: SpecialIds,
) -> TagFormat | None:
    """The format of the tag, marks as texts."""
    offered = [tool for tool in tools if choice.names is None or tool.name in choice.names]
    are_all = len(offered) == len(tools)
    if choice.mode == "none" or (choice.mode == "auto" and are_all and not any(tool.is_strict for tool in tools)):
        return None
    if syntax.calls is None:
        raise RequestError(
            f"tool_choice: {choice.mode!r} needs a model whose calls can be told from its chat template; this one's "
            f"cannot: {syntax.why_not}. Leave tools out, or serve a model with a template for tools."
        )
    is_free = choice.mode == "auto"
    is_single = not is_parallel or syntax.is_single or choice.is_single
    if isinstance(syntax.calls, Channels):
        if is_free and syntax.calls.channel in special_tokens:  # free text has no special tokens, and no channels then
            raise RequestError(_STRICT_IF_CHOSEN if are_all else _ALLOWED_IF_CHOSEN)
        return _channels(syntax.calls, offered, is_free, may_reason)
    tags = [_call(syntax.calls, tool, is_free and not tool.is_strict) for tool in offered]
    if is_free:
        if not syntax.calls.is_marked:
            raise RequestError(_STRICT_IF_CHOSEN if are_all else _ALLOWED_IF_CHOSEN)
        return _where_called(syntax.calls, tags, is_single)
    return _sequence([*ahead, _section(syntax.calls, tags, is_single)])


def _ahead(reasoning: Reasoning | None, is_open: bool) -> list[TagFormat]:
    if reasoning is None:
        return []
    reason = _tag("" if is_open else reasoning.begin, _ANY, reasoning.end)
    return [reason, _SPACE] if is_open else [_optional(_sequence([reason, _SPACE]))]


def _section(calls: CallSyntax, tags: list[TagFormat], is_single: bool) -> TagFormat:
    return _sequence([*_text(calls.begin), _several(calls, tags, is_single), *_text(calls.end)])


def _several(calls: CallSyntax, tags: list[TagFormat], is_single: bool) -> TagFormat:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def _where_called(calls: CallSyntax, tags: list[TagFormat], is_single: bool) -> TagFormat:
    if calls.begin:
        tags = [_tag(calls.begin, _several(calls, tags, is_single), calls.end)]
    return {
        "type": "triggered_tags",
        "triggers": [Literal(calls.opening).first],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": is_single and not calls.begin,
    }


def _channels(syntax: Channels, tools: Sequence[Tool], is_free: bool, may_reason: bool) -> TagFormat:
    head = f"{syntax.channel}commentary to=functions."
    tags = [
        _tag(
            f"{head}{tool.name} {syntax.constrain}json{syntax.message}",
            _schema(_ANY_OBJECT if is_free and not tool.is_strict else tool.parameters),
            syntax.call,
        )
        for tool in tools
    ]
    if is_free:
        return {
            "type": "triggered_tags",
            "triggers": [head],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": False,
        }
    if not may_reason:
        return _either(tags)
    reason = _tag(f"{syntax.channel}analysis{syntax.message}", _ANY, syntax.end)
    return _sequence([_optional(_sequence([reason, *_text(f"{syntax.start}assistant")])), _either(tags)])


def _call(calls: CallSyntax, tool: Tool, is_free: bool) -> TagFormat:
    """The tag of a call of one tool."""
    schema = _schema(_ANY_OBJECT if is_free else tool.parameters)
    body = calls.body
    if isinstance(body, JsonObject):
        ahead, behind = _around_arguments(body, tool.name)
        if body.id is not None and len(body.id) == len(body.arguments) == 1:
            schema = _sequence([schema, *_text(f", {_keys(body.id)}{_QUOTE}"), _SHORT_ID])
            behind = _QUOTE + behind
        return _tag(calls.call_begin + ahead, schema, behind + calls.call_end)
    if isinstance(body, Parameters):
        content = _ANY if is_free else _parameters(body, tool)
        return _tag(calls.call_begin + tool.name + body.after_name, content, calls.call_end)
    begin = calls.call_begin + tool.name
    if body.after_id is not None:
        named = _text(body.after_id + tool.name + body.between)
        return _tag(calls.call_begin, _sequence([_LONG_ID, *named, schema]), calls.call_end)
    if body.name_in_id:
        begin = f"{calls.call_begin}functions.{tool.name}:"
        schema = _sequence([{"type": "regex", "pattern": "[0-9]{1,4}"}, *_text(body.between), schema])
    elif body.before_id is not None:
        begin += body.before_id
        schema = _sequence([_SHORT_ID, *_text(body.between), schema])
    else:
        begin += body.between
    return _tag(begin, schema, calls.call_end)


def _around_arguments(body: JsonObject, name: str) -> tuple[str, str]:
    """The texts of a call's object ahead of its arguments and behind them."""
    depth = 0
    while body.name[depth] == body.arguments[depth] and depth < min(len(body.name), len(body.arguments)) - 1:
        depth += 1
    shared, to_name, to_arguments = body.name[:depth], body.name[depth:], body.arguments[depth:]
    ahead = (
        "".join(f"{{{json.dumps(key)}: " for key in shared)
        + f"{{{_keys(to_name)}{json.dumps(name)}{'}' * (len(to_name) - 1)}, {_keys(to_arguments)}"
    )
    return ahead, "}" * (len(to_arguments) + len(shared))


def _keys(keys: Sequence[str]) -> str:
    return ": {".join(map(json.dumps, keys)) + ": "


def _parameters(body: Parameters, tool: Tool) -> TagFormat:
    """The parameters in the schema's order, those that are required first where something has to separate them."""
    properties: Mapping[str, Any] = tool.parameters["properties"]
    required = tool.parameters.get("required")
    needed = {key for key in properties if isinstance(required, list) and key in required}
    written = {key: _parameter(body, key, schema, tool.parameters) for key, schema in properties.items()}
    if not body.separator.strip(SPACE):
        return _sequence([one if key in needed else _optional(one) for key, one in written.items()])
    separator = _text(body.separator)
    first = [one for key, one in written.items() if key in needed]
    others = [one for key, one in written.items() if key not in needed]
    if first:
        head = [part for one in first for part in (*separator, one)][len(separator) :]
        return _sequence([*head, *(_optional(_sequence([*separator, one])) for one in others)])
    chains = [
        _sequence([one, *(_optional(_sequence([*separator, later])) for later in others[place + 1 :])])
        for place, one in enumerate(others)
    ]
    return _optional(_either(chains)) if chains else _sequence([])


def _parameter(body: Parameters, key: str, schema: Any, root: Mapping[str, Any]) -> TagFormat:
    begin = body.begin + key
    if body.are_python:
        return _sequence([*_text(begin + body.between), _schema(_with_definitions(schema, root)), *_text(body.end)])
    if not allows_text_only(schema, root):
        between = body.between if body.between_json is None else body.between_json
        return _tag(begin + between, _schema(_with_definitions(schema, root)), body.end)
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return _tag(begin + body.between, _either([_sequence(_text(str(choice))) for choice in choices]), body.end)
    return _tag(begin + body.between, _ANY, body.end)


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A parameter's schema by itself, with what it refers to."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**schema, **definitions} if isinstance(schema, Mapping) else schema


def _tag(begin: str, content: TagFormat, end: str) -> TagFormat:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema(schema: Any) -> TagFormat:
    return {"type": "json_schema", "json_schema": schema}


def _text(text: str) -> list[TagFormat]:
    return [{"type": "const_string", "value": text}] if text else []


def _sequence(elements: list[TagFormat]) -> TagFormat:
    if not elements:
        return {"type": "const_string", "value": ""}
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _either(elements: list[TagFormat]) -> TagFormat:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _optional(content: TagFormat) -> TagFormat:
    return {"type": "optional", "content": content}


# --- marks that are special tokens ---


def _by_ids(part: Any, special: SpecialIds) -> Any:
    """A part of a tag whose marks are tokens by their ids, where they are special: these are no text to a grammar."""
    if isinstance(part, list):
        return [_by_ids(one, special) for one in part]
    if not isinstance(part, dict) or part.get("type") == "json_schema":
        return part
    if part.get("type") == "const_string":
        return _sequence(_pieces(part["value"], special))
    if part.get("type") == "tag":
        return _tag_by_ids(part, special)
    part = {name: _by_ids(value, special) for name, value in part.items()}
    if part.get("type") == "triggered_tags":
        tokens = [tag["begin"]["token"] for tag in part["tags"] if isinstance(tag["begin"], dict)]
        if tokens:  # all tags begin alike
            del part["triggers"]
            return part | {"type": "token_triggered_tags", "trigger_tokens": sorted(set(tokens))}
    return part


def _tag_by_ids(tag: TagFormat, special: SpecialIds) -> TagFormat:
    """A tag begins and ends with one token or text; what else its marks have goes to its content."""
    ahead, behind = _pieces(tag["begin"], special), _pieces(tag["end"], special)
    begin, end = (ahead.pop(0) if ahead else None), (behind.pop() if behind else None)
    content = _sequence([*ahead, _by_ids(tag["content"], special), *behind])
    return {"type": "tag", "begin": _mark(begin), "content": content, "end": _mark(end)}


def _mark(piece: TagFormat | None) -> Any:
    if piece is None:
        return ""
    return piece if piece["type"] == "token" else piece["value"]


def _pieces(text: str, special: SpecialIds) -> list[TagFormat]:
    """A text as texts and tokens; what ends an answer is left out, as the answer's end has its place."""
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    pieces: list[TagFormat] = []
    for index, part in enumerate(re.split(f"({pattern})", text)):
        if index % 2 == 0:
            pieces += _text(part)
        elif special[part] is not None:
            pieces.append({"type": "token", "token": special[part]})
    return pieces
