"""A piece's graph as Python source: what people read, what compile.backend eager runs, what workers compile from."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mllm_compile.errors import CompileError
from mllm_compile.passes.match.nodes import is_symbolic

_INDENT = "    "


def piece_source(piece: fx.GraphModule, title: str, symbols: Mapping[str, str]) -> str:
    """A module that defines `class Piece(torch.nn.Module)` with the graph as its forward.

    Args:
        piece: the graph.
        title: the first line of the source.
        symbols: the trace's size symbols by their public names, for the comments.

    Raises:
        CompileError: the graph calls something that a source file cannot name.
    """
    graph = _plainly_named(piece.graph)
    code = graph.python_code("self")
    used = {name: value for name, value in code.globals.items() if re.search(rf"\b{re.escape(name)}\b", code.src)}
    imports = sorted({_import_line(name, value) for name, value in used.items()} - {""})
    inputs = [
        f"{_INDENT}# {node.name}: {shape_text(node.meta['val'], symbols)}"
        for node in graph.nodes
        if node.op == "placeholder"
    ]
    body = [_INDENT + line if line.strip() else "" for line in code.src.strip().splitlines()]
    return "\n".join(
        [
            f'"""{title}"""',
            "",
            "import torch",
            *imports,
            "",
            "",
            "class Piece(torch.nn.Module):",
            *inputs,
            "",
            *body,
            "",
        ]
    )


def _plainly_named(graph: fx.Graph) -> fx.Graph:
    """A copy whose names count within the piece and name no layer: equal pieces read alike, wherever they are in a
    model and however many layers it has."""
    plain = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = re.sub(r"_\d+(?=_|$)", "", node.name)
        copy = plain.create_node(node.op, node.target, args, kwargs, name, node.type)
        if copy.op == "placeholder":
            copy.target = copy.name
        copy.meta = node.meta
        copies[node] = copy
    return plain


def shape_text(val: torch.Tensor, symbols: Mapping[str, str]) -> str:
    """The value's shape as text: `bfloat16 [1, T, 1024]`."""
    dims = ", ".join(str(size_of(dim, symbols)) for dim in val.shape)
    return f"{str(val.dtype).removeprefix('torch.')} [{dims}]"


def size_of(value: int | torch.SymInt, symbols: Mapping[str, str]) -> int | str:
    """A size as text or number, an expression of T, S, P and L: 1024, "T", "1024*T"."""
    if not is_symbolic(value):
        return int(value)
    text = str(value.node.expr)  # type: ignore[union-attr]
    for symbol, name in symbols.items():
        # Strides have Max(1, …), except of L, which may be 0.
        text = re.sub(rf"\b{symbol}\b", name, text)
        text = re.sub(rf"Max\(1, ((?:\d+\*)?{name})\)", r"\1", text)
    return text


def _import_line(name: str, value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return "" if name == "torch" else f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f'{name} = float("{value}")'
    if value is type(None):
        return "NoneType = type(None)"
    module = getattr(value, "__module__", None)
    qualified = getattr(value, "__qualname__", None)
    if module and qualified and "." not in qualified and "<" not in qualified:
        return f"from {module} import {qualified} as {name}"
    raise CompileError(f"a piece uses {name!r} ({value!r}), which cannot be written as source")
