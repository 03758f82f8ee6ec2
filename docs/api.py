"""Writes api.md, the reference of the public names, from their docstrings: `python docs/api.py`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import mllm_compile

PAGE = Path(__file__).parent / "api.md"
HEAD = """# Python API

Every public name, with its docstring, made by `python docs/api.py`. Import them from `mllm_compile`.
`mllm-compile config` prints the keys of a config; the HTTP interface is in [server](server.md).
"""
# Public for the parts of the engine, and of no use to its callers.
_INTERNAL = {
    *("Engine.from_parts", "SamplingParams.of_answer", "SamplingParams.check_vocab", "SamplingParams.has_penalties"),
    *("StructuredOutputsParams.kind", "StructuredOutputsParams.text", "StructuredOutputsParams.options"),
}
# The first names that a user needs are first.
ORDER = (
    "Engine",
    "AsyncEngine",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "Session",
    "EngineStats",
    "EngineConfig",
    "MllmError",
)


def page() -> str:
    """The whole page."""
    names = [name for name in mllm_compile.__all__ if not name.startswith("__")]
    first = [name for name in ORDER if name in names]
    sections = map(_section, [*first, *(name for name in names if name not in first)])
    return HEAD + re.sub(r"\n{3,}", "\n\n", "".join(sections))


def _section(name: str) -> str:
    thing = getattr(mllm_compile, name)
    lines = [f"\n## {name}\n", *_code(_signature(name, thing)), *_with_types(thing, _text(thing))]
    shared = [method for method in _methods(thing) if _is_shared(thing, method)]
    for method in (method for method in _methods(thing) if method not in shared):
        function = inspect.unwrap(getattr(thing, method))
        lines += [f"\n### {name}.{method}\n", *_code(_signature(method, function)), *_text(function)]
    properties = [(key, value) for key, value in _members(thing).items() if isinstance(value, property)]
    told = [f"- `{key}`: {_first_line(value)}" for key, value in properties if _is_told(thing, key)]
    lines += ["\n**Properties**\n", *told] if told else []
    lines += [f"\nThe others are Engine's, awaited: {', '.join(f'`{name}`' for name in shared)}."] if shared else []
    return "\n".join(lines) + "\n"


def _signature(name: str, thing: object) -> str | None:
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return None
    if inspect.isclass(thing) and issubclass(thing, mllm_compile.EngineConfig):
        return None  # as long as the output of `mllm-compile config`
    if dataclasses.is_dataclass(thing) and "Attributes:" in (inspect.getdoc(thing) or ""):
        return None  # the attributes tell it
    if inspect.isclass(thing) and not dataclasses.is_dataclass(thing) and "__init__" not in vars(thing):
        return None
    try:
        signature = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    parameters = [str(one) for one in signature.parameters.values() if one.name != "self"]
    result = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
    result = "" if result in (" -> None", " -> 'None'") else result.replace("'", "")
    prefix = "async def " if inspect.iscoroutinefunction(thing) or inspect.isasyncgenfunction(thing) else ""
    text = f"{prefix}{name}({', '.join(parameters)}){result}".replace("'", "")
    if len(text) <= 110:
        return text
    return f"{prefix}{name}(\n    " + ",\n    ".join(parameters).replace("'", "") + f",\n){result}"


def _with_types(thing: object, lines: Iterator[str]) -> Iterator[str]:
    """The lines, with its type and default beside each attribute of a dataclass."""
    fields = {one.name: one for one in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    for line in lines:
        match = re.match(r"- `(\w+)`: ", line)
        if match is None or (field := fields.get(match[1])) is None:
            yield line
        else:
            default = "" if field.default in (dataclasses.MISSING, "", ()) else f" = {field.default}"
            yield f"- `{field.name}: {field.type}{default}`: {line[match.end() :]}"


def _code(text: str | None) -> Iterator[str]:
    if text is not None:
        yield from ("```", text, "```", "")


def _text(thing: object) -> Iterator[str]:
    """The docstring: sections become lists, as Markdown has them."""
    for line in (inspect.getdoc(thing) or "").splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields|Returns, raises):", line):
            yield f"\n**{line.rstrip(':')}**\n"
        elif match := re.match(r"    (\w[\w, ]*(?: \([^)]*\))?): (.*)", line):
            yield f"- `{match[1]}`: {match[2]}"
        elif line.startswith("    ") and line.strip():
            yield f"  {line.strip()}"
        else:
            yield line


def _is_told(thing: type, name: str) -> bool:
    is_internal = name.startswith("_") or f"{thing.__name__}.{name}" in _INTERNAL
    return not is_internal and bool(inspect.getdoc(getattr(thing, name)))


def _is_shared(thing: type, name: str) -> bool:
    """True for a method that says no more than Engine's of that name."""
    said, original = _first_line(getattr(thing, name)), getattr(mllm_compile.Engine, name, None)
    return said == f"Like Engine.{name}." or (thing is mllm_compile.AsyncEngine and said == _first_line(original))


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _members(thing: object) -> dict[str, object]:
    """What a class has by itself and by bases that are no public names, which are parts of it in other files."""
    public = [getattr(mllm_compile, name) for name in mllm_compile.__all__]
    bases = thing.__mro__[1:] if inspect.isclass(thing) else ()
    members = dict(vars(thing))
    for base in bases:
        if base.__module__.startswith("mllm_compile.") and base not in public:
            members = {**members, **{name: value for name, value in vars(base).items() if name not in members}}
    return members


def _methods(thing: type) -> list[str]:
    return [
        name
        for name, value in _members(thing).items()
        if _is_told(thing, name) and isinstance(value, FunctionType | classmethod | staticmethod)
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
