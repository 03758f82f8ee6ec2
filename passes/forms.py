"""Adds further forms to pieces, for few tokens, beside those for any number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from mllm_compile.passes.base import SMALL_FORMS
from mllm_compile.passes.match.nodes import called_pieces


def copy_of(piece: fx.GraphModule) -> fx.GraphModule:
    """A copy of the piece, for another form of it."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(piece.graph, values)
    graph.output(output)
    for old, new in values.items():
        new.meta.update(old.meta)
    return fx.GraphModule(piece, graph)


def add_forms(
    gm: fx.GraphModule, size: int, suffix: str, make: Callable[[fx.GraphModule], fx.GraphModule | None]
) -> int:
    """Adds to every piece that is called its form for up to `size` tokens, where `make` has one; returns how many.

    A piece that has a form for several tokens already keeps that one.
    """
    forms: dict[str, dict[int, str]] = gm.meta.setdefault(SMALL_FORMS, {})
    matches = 0
    for name in called_pieces(gm):
        piece: Any = gm.get_submodule(name)
        form = None if max(forms.get(name, {}), default=0) >= size else make(piece)
        if form is not None:
            forms.setdefault(name, {})[size] = name + suffix
            gm.add_module(name + suffix, form)
            matches += 1
    return matches
