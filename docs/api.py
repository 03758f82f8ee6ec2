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

Every public name, with the docstring it has in the code. Made by `python docs/api.py`; a test holds it to the code.
Import them from `mllm_compile`. The keys of a config are printed by `mllm-compile config`; the HTTP interface is in
[server.md](server.md).
"""
# What a user begins with stands first.
ORDER = (
    "Engine",
    "AsyncEngine",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
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
    lines = [f"\n## {name}\n", *_code(_signature(name, thing)), *_text(thing)]
    for method in _methods(thing):
        function = inspect.unwrap(getattr(thing, method))
        lines += [f"\n### {name}.{method}\n", *_code(_signature(method, function)), *_text(function)]
    properties = [(key, value) for key, value in vars(thing).items() if isinstance(value, property)]
    for key, value in properties:
        if not key.startswith("_"):
            lines += [f"\n### {name}.{key}\n", *_text(value)]
    return "\n".join(lines) + "\n"


def _signature(name: str, thing: object) -> str | None:
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return None
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


def _methods(thing: type) -> list[str]:
    return [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_") and isinstance(value, FunctionType | classmethod | staticmethod)
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
