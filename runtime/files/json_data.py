"""JSON that came from elsewhere: parsed within bounds, and made into dataclasses by the types of their fields.

`json.loads` alone raises RecursionError, keeps numbers of thousands of digits, and makes gigabytes of objects of some
megabytes of brackets. A dataclass that is read has every field's type, or is refused by the field's name.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from mllm_compile.runtime.short_repr import typed_repr

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

MAX_VALUES = 2_000_000  # 100 to 200 bytes each, once they are parsed
MAX_DEPTH = 64
_MAX_DIGITS = 40  # tokenizer_config.json's usual `model_max_length` is int(1e30)
_DIGITS_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * (_MAX_DIGITS + 1)


def parse_json(data: bytes) -> Any:
    """Parses UTF-8 JSON.

    Raises:
        ValueError: it is no JSON, or holds more than MAX_VALUES values, more than MAX_DEPTH levels, or an integer of
            more than 40 digits.
    """
    openings = data.count(b"[") + data.count(b"{")
    if openings + data.count(b",") >= MAX_VALUES:  # those within strings count too
        raise ValueError(f"it holds more than {MAX_VALUES:,} values")
    parse_int = _short_int if _LONG_NUMBER in data.translate(_DIGITS_TO_ZEROS) else None
    try:
        content = json.loads(data.decode(), parse_int=parse_int)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if openings > MAX_DEPTH:
        _check_depth(content)
    return content


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits)} digits")
    return int(digits)


def _check_depth(content: Any) -> None:
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        children = chain.from_iterable(parent.values() if type(parent) is dict else parent for parent in level)
        level = [child for child in children if type(child) is dict or type(child) is list]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


@overload
def from_json(kind: type[T], data: Any) -> T: ...
@overload
def from_json(kind: types.UnionType, data: Any) -> Any: ...
def from_json(kind: Any, data: Any) -> Any:
    """Makes `data`, as JSON has it, a value of `kind`: a dataclass or whatever its fields may be.

    Fields are str, int, float, bool, Any, torch.dtype (by its name), Literal, dataclasses, generic ones of such types,
    and tuples, mappings and unions of these. A dataclass is an object with a key for each field and no other. Nothing
    is converted but a list to a tuple, and an integer to a float.

    Raises:
        ValueError: naming the field, what it got and what it takes.
    """
    return _reader(kind)(data)


class _Mistake(ValueError):
    """A field that is wrong; its message grows by the fields around it."""


_Reader = Callable[[Any], Any]
_LISTS = (list, tuple)  # a tuple: data that has not been through JSON yet


_readers: dict[Any, _Reader] = {}


def _reader(kind: Any) -> _Reader:
    """The function that makes JSON a value of `kind`; made once."""
    if kind not in _readers:
        _readers[kind] = _new_reader(kind)
    return _readers[kind]


def _new_reader(kind: Any) -> _Reader:
    if kind is Any:
        return lambda data: data
    if (kind.__module__, getattr(kind, "__name__", None)) == ("torch", "dtype"):
        return _dtype
    if kind in (str, int, bool, type(None)):
        return lambda data: data if type(data) is kind else _refuse(data, kind)
    if kind is float:
        return lambda data: float(data) if type(data) in (int, float) else _refuse(data, kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        parameters: tuple[Any, ...] = getattr(origin, "__parameters__", ())
        return _dataclass_reader(origin, dict(zip(parameters, arguments, strict=True)))
    if origin is Literal:
        return lambda data: data if type(data) is str and data in arguments else _refuse(data, kind)
    if origin in (Union, types.UnionType):
        return _union_reader(kind, [_reader(argument) for argument in arguments])
    if origin is tuple and arguments[1:] == (Ellipsis,):
        item = _reader(arguments[0])
        return lambda data: tuple(map(item, data)) if type(data) in _LISTS else _refuse(data, kind)
    if origin is tuple:
        items = [_reader(argument) for argument in arguments]
        return lambda data: (
            tuple(item(value) for item, value in zip(items, data, strict=True))
            if type(data) in _LISTS and len(data) == len(items)
            else _refuse(data, kind)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[0] is str:
        return _mapping_reader(kind, _reader(arguments[1]))
    raise TypeError(f"no field of JSON is {kind}")


def _refuse(data: Any, kind: Any) -> NoReturn:
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")
    raise _Mistake(f"expected {name}, got {typed_repr(data)}")


def _within(name: str, mistake: _Mistake) -> _Mistake:
    said = str(mistake)
    return _Mistake(f"{name}{': ' if said.startswith('expected') else '.'}{said}")


def _dtype(data: Any) -> torch.dtype:
    import torch

    dtype = getattr(torch, data, None) if type(data) is str else None
    return dtype if isinstance(dtype, torch.dtype) else _refuse(data, torch.dtype)


def _union_reader(kind: Any, members: list[_Reader]) -> _Reader:
    def read(data: Any) -> Any:
        mistakes: list[_Mistake] = []
        for member in members:
            try:
                return member(data)
            except _Mistake as mistake:
                mistakes.append(mistake)
        if ":" in str(mistakes[-1]) and type(data) is dict:  # of a field within the one member that is a dataclass
            raise mistakes[-1]
        _refuse(data, kind)

    # `X | None`, which nearly every union is: None is told from the rest without an error.
    if len(members) == 2 and members[1] is _reader(type(None)):
        some = members[0]
        return lambda data: None if data is None else some(data)
    return read


def _bound(hint: Any, given: Mapping[Any, Any]) -> Any:
    """A field's type, with what its parameters stand for."""
    parameters = getattr(hint, "__parameters__", ())
    if hint in given:
        return given[hint]
    return hint[tuple(given[one] for one in parameters)] if parameters else hint


def _mapping_reader(kind: Any, item: _Reader) -> _Reader:
    def read(data: Any) -> dict[str, Any]:
        if type(data) is not dict:
            _refuse(data, kind)
        try:
            return {key: item(value) for key, value in data.items()}
        except _Mistake:
            for key, value in data.items():
                try:
                    item(value)
                except _Mistake as mistake:
                    raise _within(key, mistake) from None
            raise

    return read


def _dataclass_reader(kind: Any, given: Mapping[Any, Any] | None = None) -> _Reader:
    """Args: given: what the parameters of a generic one stand for."""
    hints = get_type_hints(kind)
    readers = {field.name: _reader(_bound(hints[field.name], given or {})) for field in dataclasses.fields(kind)}

    def read(data: Any) -> Any:
        if type(data) is not dict:
            _refuse(data, kind)
        if data.keys() != readers.keys():
            odd = min(data.keys() ^ readers.keys())
            raise _Mistake(f"expected {'a' if odd in readers else 'no'} key {odd!r} in {kind.__name__}")
        values = {}
        for name, reader in readers.items():
            try:
                values[name] = reader(data[name])
            except _Mistake as mistake:
                raise _within(name, mistake) from None
        return kind(**values)

    return read
