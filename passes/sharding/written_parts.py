"""Values that a trace writes part by part, as what they are: parts joined along a dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match.nodes import call, is_call, is_symbolic


def join_written_parts(graph: fx.Graph) -> None:
    """Replaces parts that are written into a fresh tensor, and fill it in order, by their concatenation.

    Before::

        room = x.new_empty(1, H, T, 24)
        first = slice_scatter(room, a, 3, 0, 16, 1); y = slice_scatter(first, b, 3, 16, None, 1)

    After::

        y = cat((a, b), 3)
    """
    for node in list(graph.nodes):
        parts = _parts(node)
        if parts is not None:
            dim, joined = parts
            with graph.inserting_before(node):
                whole = call(graph, torch.cat, tuple(joined), dim)
            whole.meta.update({key: value for key, value in node.meta.items() if key != "val"})
            node.replace_all_uses_with(whole)
            graph.erase_node(node)


def _parts(node: fx.Node) -> tuple[int, list[fx.Node]] | None:
    """The dimension and the parts in order, of the last of the writes that fill a tensor."""
    found: list[tuple[int, int, fx.Node]] = []
    dims = set()
    one: Any = node
    while is_call(one, torch.ops.aten.slice_scatter.default):
        arguments: list[Any] = list(one.args)
        base, part = arguments[:2]
        where = arguments[2:]
        dim, start, stop, step = where + [0, None, None, 1][len(where) :]
        size = base.meta["val"].shape[dim]
        if step != 1 or is_symbolic(size) or (one is not node and len(one.users) != 1):
            return None
        begin, end, _ = slice(start, stop).indices(int(size))
        found.append((begin, end, part))
        dims.add(dim % base.meta["val"].dim())
        one = base
    if len(dims) != 1 or not is_call(one, "new_empty") or len(one.users) != 1:
        return None
    found.sort(key=lambda part: part[0])
    (dim,) = dims
    ends = [0, *(end for _, end, _ in found)]
    fills = [begin for begin, _, _ in found] == ends[:-1] and ends[-1] == int(one.meta["val"].shape[dim])
    return (dim, [part for _, _, part in found]) if fills else None
