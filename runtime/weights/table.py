"""Where weights come from, as JSON: of a weight's parts a column for each field, in place of an object for each part.

Experts that are stored one by one are many thousand parts, alike except for a name and a place. Of a column whose
values are equal there is one; a column of dataclasses or of mappings is a table again.

    {"name": "model.layers.0.mlp.experts.down_proj", "shape": [128, 2048, 768], "dtype": "bfloat16", "byte_sum": null,
     "num_parts": 128,
     "parts": {"fields": {"tensor": {"each": ["model.layers.0.mlp.experts.0.down_proj.weight", …]},
                          "file": {"all": "model-00001-of-00016.safetensors"}, "start": {"each": [0, 1, …]}, …}}}
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import torch

from mllm_compile.runtime.files.json_data import MAX_VALUES, from_json
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec

_PARTS, _NUM_PARTS = "parts", "num_parts"


def weights_to_json(specs: Iterable[WeightSpec]) -> list[dict[str, Any]]:
    """The tables of some weights."""
    return [
        {field.name: _jsonable(getattr(spec, field.name)) for field in fields(spec) if field.name != _PARTS}
        | {_NUM_PARTS: len(spec.parts), _PARTS: _column(spec.parts)}
        for spec in specs
    ]


def weights_from_json(data: Any) -> tuple[WeightSpec, ...]:
    """Raises ValueError for anything that weights_to_json would not have written."""
    weights, room = [], MAX_VALUES
    for one in from_json(tuple[dict[str, Any], ...], data):
        weights.append(_weight(one, room))
        room -= len(weights[-1].parts)
    return tuple(weights)


def _weight(data: dict[str, Any], most_parts: int) -> WeightSpec:
    if _PARTS not in data or _NUM_PARTS not in data:
        raise ValueError(f"expected a weight with {_PARTS!r} and {_NUM_PARTS!r}, got {typed_repr(data)}")
    others = {name: value for name, value in data.items() if name not in (_PARTS, _NUM_PARTS)}
    num_parts = from_json(int, data[_NUM_PARTS])
    if not 0 <= num_parts <= most_parts:  # a few words make any number of them
        raise ValueError(
            f"expected weights of at most {MAX_VALUES:,} parts, got {MAX_VALUES - most_parts + num_parts:,}"
        )
    spec = from_json(WeightSpec, {**others, _PARTS: ()})
    if any(size < 0 for size in spec.shape) or spec.num_bytes >= 1 << 63:
        raise ValueError(f"{short_repr(spec.name)}: expected a weight's shape, got {short_repr(spec.shape)}")
    return replace(spec, parts=tuple(_values(WeightPart, data[_PARTS], num_parts)))


def _column(values: Sequence[Any]) -> dict[str, Any]:
    """The values as a column: {"all": value}, {"each": values}, {"fields": columns} or {"keys": columns}."""
    if values and all(value == values[0] for value in values):
        return {"all": _jsonable(values[0])}
    if len({type(value) for value in values}) == 1 and is_dataclass(values[0]):
        return {"fields": _columns(values, [field.name for field in fields(values[0])], getattr)}
    if all(isinstance(value, Mapping) for value in values) and len({frozenset(value) for value in values}) == 1:
        return {"keys": _columns(values, values[0], lambda value, key: value[key])}
    return {"each": _jsonable(tuple(values))}


def _columns(values: Sequence[Any], names: Iterable[str], get: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {name: _column([get(value, name) for value in values]) for name in names}


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return {field.name: _jsonable(getattr(value, field.name)) for field in fields(value)}


def _values(kind: Any, column: Any, count: int) -> Sequence[Any]:
    """So many values of the type `kind`, from their column."""
    form, content = next(iter(column.items())) if type(column) is dict and len(column) == 1 else (None, None)
    if form == "all":
        return [from_json(kind, content)] * count
    if form == "each":
        values: Sequence[Any] = from_json(tuple[kind, ...], content)
        if len(values) == count:
            return values
    if form == "fields" and type(content) is dict:
        made = _member(kind, is_dataclass)
        hints = _hints(made)
        if content.keys() == hints.keys():
            return list(map(made, *(_values(hint, content[name], count) for name, hint in hints.items())))
    if form == "keys" and type(content) is dict:
        item = get_args(_member(kind, lambda one: get_origin(one) is Mapping))[1]
        columns = [_values(item, one, count) for one in content.values()]
        if columns:  # without keys all are the same, which "all" says; zip would give none
            return [dict(zip(content, row, strict=True)) for row in zip(*columns, strict=True)]
    raise ValueError(f"expected a column of {count} values, got {typed_repr(column)}")


_hints = cache(get_type_hints)  # it parses them anew each time


def _member(kind: Any, is_wanted: Callable[[Any], bool]) -> Any:
    """The type itself, or the one of a union, that can be such a column."""
    for one in get_args(kind) if isinstance(kind, types.UnionType) else (kind,):
        if is_wanted(one):
            return one
    raise ValueError(f"expected no column of columns for {kind}")
