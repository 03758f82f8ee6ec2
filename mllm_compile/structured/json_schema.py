"""JSON schemas: the parts that they have, and what is refused of them where a library would not keep to it.

These checks hold for every backend: all read numbers as floats of 64 bits, and none counts equal names of properties
once. A backend adds checks of keys that it ignores (xgrammar_limits.py, llguidance_backend.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Where a keyword of JSON Schema holds further schemas.
_ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "additionalItems")
_ONE_MORE = ("unevaluatedItems", "unevaluatedProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")

_OLD = ("divisibleBy", "disallow", "extends")  # asserted by drafts before the fourth, unknown to later ones
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST_EXACT = (1 << 53) - 1  # beyond it two integers are one float
_MOST_COUNT = (1 << 31) - 1


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it, wherever keywords or references have them; each once, without recursion."""
    left, seen = [schema], set()
    while left:
        part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        left += [part[key] for key in (*_ONE, *_ONE_MORE) if key in part]
        left += [child for key in _LISTS if isinstance(part.get(key), list) for child in part[key]]
        left += [child for key in _MAPS if isinstance(part.get(key), dict) for child in part[key].values()]
        left.append(_referred(schema, part.get("$ref")))


def _referred(schema: Any, reference: Any) -> Any:
    """The place that a reference within the document leads to, None where it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place = schema
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict):
            place = place.get(name)
        else:
            return None
    return place


def first_fault(schema: Any, backend_fault: Callable[[dict[str, Any]], str | None] = lambda part: None) -> str | None:
    """The part of a schema that would not be kept to, None if all of it is.

    Args:
        backend_fault: of one part of the schema, what the backend itself does not keep to.
    """
    faults = (_fault(part) or backend_fault(part) for part in subschemas(schema))
    return next((fault for fault in faults if fault is not None), None)


def _fault(part: Mapping[str, Any]) -> str | None:
    old = next((key for key in _OLD if key in part), None)
    if old is not None:
        return f"{old}, which JSON Schema no longer has"
    if not isinstance(part.get("required", []), list):
        return "required that is no list of names"
    for key in _BOUNDS:
        if key in part and (isinstance(part[key], bool) or not isinstance(part[key], int | float)):
            return f"{key} that is no number"
        if abs(part.get(key, 0)) > _MOST_EXACT:
            return f"{key} beyond 2**53, where numbers are rounded"
    for key in _COUNTS:
        if key in part and not _is_count(part[key]):
            return f"{key} that is no whole number from 0 to {_MOST_COUNT}"
    for key in ("enum", "const"):
        if _has_large_number(part.get(key)):
            return f"{key} with a number beyond 2**53, where numbers are rounded"
    # Only names of `properties` are held to be there once; another one twice is still one property.
    required = part.get("required", [])
    if part.get("minProperties", 0) > len({name for name in required if isinstance(name, str)}) + 1:
        return "minProperties of more than one name that required lacks, as a name may come twice"
    return None


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return is_whole and 0 <= value <= _MOST_COUNT


def _has_large_number(value: Any) -> bool:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, int | float) and abs(one) > _MOST_EXACT:
            return True
    return False


def without_additional_properties(text: str) -> str:
    """A schema whose objects have only listed properties, unless they say otherwise themselves."""
    schema = json.loads(text)
    for part in subschemas(schema):
        if "additionalProperties" not in part and ("properties" in part or "patternProperties" in part):
            part["additionalProperties"] = False
    return json.dumps(schema, separators=(",", ":"))
