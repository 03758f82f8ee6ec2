"""Values of arguments become JSON: bare text by what the tool's schema says of it, and an object that broke off.

A server gives out what its model wrote, also where the answer broke off in the middle, and clients give that back as
history. A turn is not refused for it: a template that takes an object gets one (`object_of`).
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

_INTEGER = re.compile(r"-?(0|[1-9]\d*)")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_NAMES = {"true": True, "false": False, "null": None, "none": None}
_MOST_PYTHON = 1 << 16  # characters
_MOST_NESTED = 16  # of schemas that lead to schemas
# The name of a text that is no object, and cannot be completed to one; Anthropic's documentation advises it.
INVALID_JSON = "INVALID_JSON"

_MARK = re.compile(r'["{}\[\],]')
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_CLOSING = {"{": "}", "[": "]"}
_MOST_OPEN = 100  # objects and lists in each other


def as_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON text of a parameter that was written without quotes.

    A text that fits no type of the schema becomes a string, so that no text is lost.

    Args:
        text: what the model wrote.
        schema: of the parameter; None if the tool has no such parameter.
        root: the schema of all of the tool's parameters, where references lead.
    """
    types = _types(schema, root, 0)
    stripped = text.strip()
    if not allows_text_only(schema, root):
        for value in (stripped, stripped.lower() if stripped.lower() in _NAMES else ""):
            if (not types or _type_of(value) in types) and _is_json(value):
                return value
        if not types or types & {"object", "array", "boolean", "null"}:
            literal = _from_python(stripped)
            if literal is not None and (not types or _type_of(literal) in types) and not literal.startswith('"'):
                return literal
    return json.dumps(text, ensure_ascii=False)


def python_as_json(text: str) -> str:
    """The JSON text of a literal of Python or JSON; what is neither becomes a string."""
    stripped = text.strip()
    if _is_json(stripped):
        return stripped
    value = _from_python(stripped)
    return json.dumps(stripped, ensure_ascii=False) if value is None else value


def of_whole_characters(text: str) -> str:
    r"""The text with U+FFFD for each half of a character (a model may write `\ud800`), which no answer can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def property_schema(parameters: Mapping[str, Any], name: str) -> Any:
    """The schema of a parameter; None if the tool's schema does not name it."""
    properties = parameters.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def allows_text_only(schema: Any, root: Mapping[str, Any]) -> bool:
    """True if a parameter is a string and nothing else, so that what is written is its text."""
    return _types(schema, root, 0) == {"string"}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MOST_NESTED:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    stated = schema.get("type")
    if isinstance(stated, str):
        types = {stated}
    elif isinstance(stated, list):
        types = {one for one in stated if isinstance(one, str)}
    elif isinstance(schema.get("enum"), list):
        types = {_type_of(json.dumps(value)) for value in schema["enum"]}
    elif "const" in schema:
        types = {_type_of(json.dumps(schema["const"]))}
    else:
        types = set()
        for key in ("anyOf", "oneOf", "allOf"):
            for one in schema[key] if isinstance(schema.get(key), list) else ():
                types |= _types(one, root, depth + 1)
    return types | ({"integer"} if "number" in types else set())


def _type_of(text: str) -> str:
    """The type that a value of JSON has, by its look."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return kinds.get(text[:1]) or ("integer" if _INTEGER.fullmatch(text) else "number")


def _is_json(text: str) -> bool:
    if text[:1] not in '{["':
        return text in ("true", "false", "null") or _NUMBER.fullmatch(text) is not None
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _from_python(text: str) -> str | None:
    """The JSON text of a literal, Python's or with JSON's names in it; None for other text."""
    if not text or len(text) > _MOST_PYTHON:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            value = _value_of(ast.parse(text, mode="eval").body)
        return of_whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _value_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value_of(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {_key_of(key): _value_of(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Name) and node.id.lower() in _NAMES:
        return _NAMES[node.id.lower()]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand)
    raise ValueError("no literal")


def _key_of(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key that is no string")
    return node.value


# --- arguments that are no object ---


def object_of(text: str) -> dict[str, Any]:
    """The object of a call's arguments: as it is, completed where it broke off, or with the whole text as a member."""
    value = _parsed(text)
    if not isinstance(value, dict):
        value = _completed(text)
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _parsed(text: str) -> Any:
    """The value of a JSON text; None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _without_open_escape(text: str) -> str:
    escape = _ESCAPE.search(text, len(text) - 5)
    if escape is None:
        return text
    before = text[: escape.start() + 1]
    is_open = (len(before) - len(before.rstrip("\\"))) % 2 == 1
    return text[: escape.start()] if is_open else text


def _completed(text: str) -> Any:
    """The object that a text begins, with all members that are whole, and the one that broke off if it has a value."""
    if not text.lstrip().startswith("{"):
        return None
    opened: list[str] = []
    whole, depth, at = 0, 0, 0  # where the last whole member ends, and how many are open there
    while found := _MARK.search(text, at):
        at = found.end()
        mark = found[0]
        if mark == '"':
            string = _STRING.match(text, found.start())
            if string is None:
                text = _without_open_escape(text) + '"'
                break
            at = string.end()
        elif mark in _CLOSING:
            opened.append(_CLOSING[mark])
            whole, depth = at, len(opened)
        elif mark == ",":
            whole, depth = found.start(), len(opened)
        elif opened and opened.pop() == mark:
            whole, depth = at, len(opened)
        else:
            return None
        if len(opened) > _MOST_OPEN:
            return None
    value = _parsed(text + "".join(reversed(opened)))
    return _parsed(text[:whole] + "".join(reversed(opened[:depth]))) if value is None else value
