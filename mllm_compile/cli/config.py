"""`mllm-compile config`: every key of a YAML config, as a file to begin with."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from mllm_compile.errors import ConfigError

_WIDTH = 100
_TEXT = "a text"


def config_command(
    section: Annotated[str | None, typer.Argument(help="One section alone.", show_default="all of them")] = None,
) -> None:
    """Print every key of a config with its values, its default and what it does, as YAML to begin with."""
    from mllm_compile.config.schema import EngineConfig

    sections = {name: field.annotation for name, field in EngineConfig.model_fields.items()}
    if section is not None and section not in sections:
        raise ConfigError(f"there is no section {section}; expected one of {', '.join(sections)}")
    for name, kind in sections.items():
        if section in (None, name):
            print("\n".join(_lines(name, kind)))


def _lines(name: str, section: Any) -> Iterator[str]:
    """The YAML of a section; each key that has a default is a comment."""
    told = _docstrings(section)
    yield f"# {section.__doc__}"
    yield f"{name}:"
    for key, field in section.model_fields.items():
        yield from (f"  # {line}" for line in textwrap.wrap(" ".join(told[key].split()), _WIDTH))
        if field.is_required():
            yield f"  {key}: Qwen/Qwen3-0.6B"
            continue
        inner = _docstrings(field.annotation) if hasattr(field.annotation, "model_fields") else {}
        for name_inside, text in inner.items():
            yield from (f"  #   {line}" for line in textwrap.wrap(f"{name_inside}: {' '.join(text.split())}", _WIDTH))
        values = _values(field.annotation, field.metadata)
        yield f"  # {key}: {_shown(field.default)}{f'  # {values}' if values else ''}"
    yield ""


def _docstrings(section: type) -> dict[str, str]:
    """The text below each field of the class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    statements = body.body if isinstance(body, ast.ClassDef) else []
    told = {}
    for field, text in itertools.pairwise(statements):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            told[ast.unparse(field.target)] = str(text.value.value)
    return told


def _values(kind: Any, metadata: Any = ()) -> str:
    """The values that a key takes, as far as its type says so: "auto, none or a number above 0"."""
    options = list(dict.fromkeys(_options(kind, tuple(metadata))))
    return "" if options == [_TEXT] else " or ".join(filter(None, [", ".join(options[:-1]), *options[-1:]]))


def _options(kind: Any, metadata: tuple[Any, ...]) -> Iterator[str]:
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        yield from _options(inner, (*more, *metadata))
    elif get_origin(kind) in (Union, types.UnionType):
        for one in get_args(kind):
            yield from _options(one, metadata)
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif kind is type(None):
        yield "null"
    elif kind is bool:
        yield from ("true", "false")
    elif kind in (int, float):
        yield f"a {'whole ' if kind is int else ''}number{_range(metadata)}"
    elif kind is str:
        yield _TEXT
    elif get_origin(kind) is tuple:
        yield "a list"
    elif get_origin(kind) is dict:
        yield "a text for each name"


def _range(metadata: tuple[Any, ...]) -> str:
    """Bounds of a number; pydantic's Field holds its own as metadata."""
    bounds = [bound for one in metadata for bound in (one, *getattr(one, "metadata", ()))]
    names = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    found = [f" {word} {getattr(bound, name)}" for name, word in names.items() for bound in bounds if _has(bound, name)]
    return "".join(found)


def _has(bound: Any, name: str) -> bool:
    return getattr(bound, name, None) is not None


def _shown(value: Any) -> str:
    """A default as YAML has it."""
    if isinstance(value, tuple):
        value = list(value)
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return value if isinstance(value, str) else json.dumps(value)
