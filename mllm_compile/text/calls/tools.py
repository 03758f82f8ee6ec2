"""A request's `tools` and `tool_choice`, OpenAI's, checked before anything is rendered or compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import short_repr, typed_repr

MAX_TOOLS = 512
MAX_BYTES = 1 << 20  # of all tools as JSON
MAX_NESTED = 64  # objects and lists within each other

_NAME = re.compile(r"[A-Za-z0-9_./:-]{1,128}")
_EXPECTED = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"
_ALLOWED = (
    "{'type': 'allowed_tools', 'allowed_tools': {'mode': …, 'tools': [{'type': 'function', 'function': {'name': …}}, "
    "…]}}"
)
_FIELDS = frozenset({"name", "description", "parameters", "strict"})

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object's.
        is_strict: its arguments must match the schema, also where the model may choose to call it or not.
        definition: for the chat template.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    is_strict: bool = False
    definition: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolChoice:
    """
    Attributes:
        mode: `none`: no calls; `auto`: the model decides; `required`: at least one.
        names: the tools that may be called; None: all that are offered.
        is_single: exactly one call, as of a tool that is named.
    """

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    is_single: bool = False


def read_tools(value: Any) -> tuple[Tool, ...]:
    """The tools of a request; none if it has none.

    Raises:
        RequestError: they are not OpenAI's functions, too many, too large or nested too deep, or share a name.
    """
    if value is None:
        return ()
    if not _is_list(value):
        raise RequestError(f"tools: expected a list of {_EXPECTED}, got {typed_repr(value)}.")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"tools: {len(value)} of them; expected at most {MAX_TOOLS}. Offer fewer.")
    if _nested(value) > MAX_NESTED:
        raise RequestError(f"tools: nested deeper than {MAX_NESTED} levels. Flatten the parameters' schemas.")
    try:
        size = len(json.dumps(value, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        raise RequestError(f"tools: expected plain JSON data: {error}.") from None
    if size > MAX_BYTES:
        raise RequestError(f"tools: {size} bytes as JSON; expected at most {MAX_BYTES}. Offer fewer or shorter ones.")
    tools = tuple(_read_tool(index, entry) for index, entry in enumerate(value))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools: tool {index} has the name of tool {names.index(name)}, {name!r}. Rename one.")
    return tools


def _read_tool(index: int, entry: Any) -> Tool:
    where = f"tools: tool {index}"
    if not isinstance(entry, Mapping):
        raise RequestError(f"{where}: expected {_EXPECTED}, got {typed_repr(entry)}.")
    if entry.get("type") != "function":
        raise RequestError(
            f"{where}: type is {short_repr(entry.get('type'))}; expected 'function', the only type there is."
        )
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}: expected {_EXPECTED}, got {typed_repr(entry)}.")
    name, parameters = function.get("name"), function.get("parameters")
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}: name is {short_repr(name)}; expected 1 to 128 letters, digits or any of '_', '-', '.', '/', ':'."
        )
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where} ({name}): description is {typed_repr(description)}; expected a text.")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where} ({name}): strict is {typed_repr(strict)}; expected true or false.")
    unknown = sorted(set(map(str, function)) - _FIELDS)
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise RequestError(f"{where} ({name}): {short_repr(unknown[0])} is no field of a function; expected {known}.")
    if parameters is None:
        parameters = NO_PARAMETERS
    elif not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where} ({name}): parameters are {typed_repr(parameters)}; expected the JSON schema of an object, "
            "{'type': 'object', 'properties': …}."
        )
    elif not isinstance(parameters.get("properties", {}), Mapping):
        raise RequestError(
            f"{where} ({name}): properties are {typed_repr(parameters['properties'])}; expected schemas by name."
        )
    parameters = {**NO_PARAMETERS, **parameters}  # templates read both
    shown_to_model = {key: value for key, value in function.items() if key != "strict"} | {"parameters": parameters}
    return Tool(name, parameters, bool(strict), {"type": "function", "function": shown_to_model})


def read_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The choice of a request; without one `auto` if there are tools, else `none`.

    Raises:
        RequestError: it is malformed, or needs a tool that is not offered.
    """
    if value is None:
        return ToolChoice("auto" if tools else "none")
    names = [tool.name for tool in tools]
    if value in ("none", "auto", "required"):
        if value == "required" and not tools:
            raise RequestError("tool_choice: 'required' without tools. Offer at least one in tools.")
        return ToolChoice("none" if not tools else value)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _read_allowed(value, names)
    name = _function_name(value)
    if name is None:
        raise RequestError(
            "tool_choice: expected 'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or "
            f"{_ALLOWED}, got {typed_repr(value)}."
        )
    _check_offered(name, names)
    return ToolChoice("required", frozenset((name,)), is_single=True)


def _read_allowed(value: Mapping[str, Any], names: Sequence[str]) -> ToolChoice:
    """OpenAI's choice among some of the tools."""
    allowed = value.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    chosen = [_function_name(one) for one in listed] if is_list and listed is not None else []
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required") or not chosen:
        raise RequestError(
            f"tool_choice: expected {_ALLOWED} with a mode of auto or required, got {typed_repr(value)}."
        )
    for name in chosen:
        if name is None:
            raise RequestError(f"tool_choice: expected {_ALLOWED}, whose tools are functions, got {typed_repr(value)}.")
        _check_offered(name, names)
    return ToolChoice(allowed["mode"], frozenset(name for name in chosen if name is not None))


def _check_offered(name: str, names: Sequence[str]) -> None:
    if name not in names:
        known = short_repr(", ".join(names)) if names else "none"
        raise RequestError(f"tool_choice: {short_repr(name)} is not among the tools: {known}. Offer it in tools.")


def _function_name(value: Any) -> str | None:
    """The name in {'type': 'function', 'function': {'name': …}}, None if it is another value."""
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _nested(value: Any) -> int:
    """Levels of objects and lists; counted without recursion, no further than one too many."""
    levels, layer = 0, [value]
    while layer and levels <= MAX_NESTED:
        containers = [one for one in layer if isinstance(one, Mapping) or _is_list(one)]
        layer = [inner for one in containers for inner in (one.values() if isinstance(one, Mapping) else one)]
        levels += bool(containers)
    return levels


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
