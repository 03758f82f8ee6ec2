"""Parts of forms that XGrammar takes without keeping to them: they are refused before it is asked.

Its converter of schemas warns, or says nothing; its regular expressions leave anchors out, and its grammars look-ahead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mllm_compile.structured.form import Refused
from mllm_compile.structured.json_schema import first_fault

_IGNORED = (
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "allOf", "oneOf",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "multipleOf",
    "additionalItems", "$dynamicRef", "$recursiveRef",
    # Seen to let quotes and control characters into strings, which is no JSON then.
    "minLength", "maxLength", "pattern", "patternProperties", "propertyNames",
)  # fmt: skip
_ALONE = {"$ref", "anyOf", "enum", "const"}  # keys beside them are ignored, except annotations:
_ANNOTATIONS = {
    "$defs", "definitions", "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated",
    "readOnly", "writeOnly", "$anchor",
}  # fmt: skip
# Ignored where several types are named, and where none is, unless they tell the type.
_OF_TYPES = {
    "minimum": {"integer", "number"}, "maximum": {"integer", "number"}, "exclusiveMinimum": {"integer", "number"},
    "exclusiveMaximum": {"integer", "number"}, "format": {"string"}, "minItems": {"array"}, "maxItems": {"array"},
    "minProperties": {"object"}, "maxProperties": {"object"},
    "items": {"array"}, "prefixItems": {"array"}, "properties": {"object"}, "required": {"object"},
    "additionalProperties": {"object"},
}  # fmt: skip
_TELL_THE_TYPE = {"items", "prefixItems", "properties", "required", "additionalProperties"}
# Others have the look of the format alone: days that a month lacks, leading zeros, strings that are no JSON.
_FORMATS = {"email", "duration", "ipv6", "hostname", "uuid", "uri", "time"}
_ESCAPES = set("dDwWsSnrtfvxu0")  # that mean what they mean elsewhere; another letter is taken as itself
_LOOK_AHEAD = re.compile(r"""["'](?:[^"'\\\n]|\\.)*["']|\[(?:[^\]\\]|\\.)*\]|\#[^\n]*|(?P<ahead>\(\s*=)""")


def refuse_ignored_keywords(schema: Any) -> None:
    """
    Raises:
        Refused: the schema has a keyword, or keywords together, that XGrammar does not keep to.
    """
    fault = first_fault(schema, lambda part: next(_faults(part), None))
    if fault is not None:
        raise Refused(f"xgrammar does not keep to all of the JSON schema: {fault}")


def _faults(part: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in _IGNORED if key in part)
    lone = sorted(_ALONE & part.keys())
    if lone:
        values = part.get("enum", [part["const"]] if "const" in part else None)
        others = sorted(part.keys() - _ANNOTATIONS - {lone[0]} - ({"type"} if values is not None else set()))
        yield from (f"{lone[0]} beside {other}" for other in others[:1])
        if values is not None and "type" in part and not _are_all(values, part["type"]):
            yield f"a value of {lone[0]} that is no {part['type']}"
    kind = part.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    for key in _OF_TYPES.keys() & part.keys():
        is_ignored = kind is None and key not in _TELL_THE_TYPE
        if is_ignored or (len(kinds) > 1 and not _OF_TYPES[key].isdisjoint(map(str, kinds))):
            yield f"{key} without the one type that it is of"
    if "format" in part and "string" in kinds and part["format"] not in _FORMATS:
        yield f"format {part['format']!r}"
    if not _is_in_document(part.get("$ref", "#")):
        yield "a $ref to another document"
    if isinstance(part.get("items"), list):
        yield "items that is a list"
    if set(map(str, part.get("required", ()))) - set(part.get("properties", {})):
        yield "required names that properties lacks"


def _is_in_document(reference: Any) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _are_all(values: Any, name: Any) -> bool:
    """True if JSON values are all of the one type of this name."""
    types: dict[str, tuple[type, ...]] = {
        "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
        "object": (dict,), "array": (list,),
    }  # fmt: skip
    wanted = types.get(name, ()) if isinstance(name, str) else ()
    return isinstance(values, list) and all(type(value) in wanted for value in values)  # a bool is no integer


def kept_regex(pattern: str) -> str:
    """The regular expression as XGrammar has to be given it: its dot takes line feeds too.

    Raises:
        Refused: it has what XGrammar takes as if it were not there.
    """
    parts: list[str] = []
    is_class = False
    for match in re.finditer(r"\\?.", pattern, re.DOTALL):
        one, place = match[0], match.start()
        if one[0] == "\\" and one[1:].isascii() and one[1:].isalpha() and one[1] not in _ESCAPES | set("bBpPk"):
            raise Refused(f"xgrammar knows no {one} in a regex")
        if not is_class and ((one == "^" and place > 0) or (one == "$" and place < len(pattern) - 1)):
            raise Refused(f"xgrammar ignores {one} within a regex; it may stand at its start or end alone")
        parts.append("[^\\n]" if one == "." and not is_class else one)
        is_class = one == "[" or (is_class and one != "]")
    return "".join(parts)


def refuse_ignored_look_ahead(grammar: str) -> None:
    """
    Raises:
        Refused: the grammar in EBNF looks ahead, which XGrammar does not hold an answer to.
    """
    if any(match["ahead"] for match in _LOOK_AHEAD.finditer(grammar)):
        raise Refused("xgrammar does not keep to a look-ahead, (= …), in a grammar")


def kept_tag(part: Any, most_whitespace: int) -> Any:
    """A part of a structural tag, whatever it is in, with what it holds checked as a form of its own is.

    Args:
        most_whitespace: characters between the parts of JSON.

    Raises:
        Refused: a schema, regex or grammar in it has what XGrammar does not keep to.
    """
    if isinstance(part, list):
        return [kept_tag(one, most_whitespace) for one in part]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in ("json_schema", "qwen_xml_parameter"):
        refuse_ignored_keywords(part.get("json_schema"))
        return {"max_whitespace_cnt": most_whitespace, **part} if kind == "json_schema" else part
    if kind == "regex" and isinstance(part.get("pattern"), str):
        return {**part, "pattern": kept_regex(part["pattern"])}
    if kind == "grammar" and isinstance(part.get("grammar"), str):
        refuse_ignored_look_ahead(part["grammar"])
    return {name: kept_tag(value, most_whitespace) for name, value in part.items()}
