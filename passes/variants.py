"""Adds further variants to pieces, for few tokens, beside those for any number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.match.nodes import called_pieces


def copy_of(piece: fx.GraphModule) -> fx.GraphModule:
    """A copy of the piece, for another variant of it."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(piece.graph, values)
    graph.output(output)
    for old, new in values.items():
        new.meta.update(old.meta)
    return fx.GraphModule(piece, graph)


def add_variants(
    gm: fx.GraphModule, size: int, suffix: str, make: Callable[[fx.GraphModule], fx.GraphModule | None]
) -> int:
    """Adds to every piece that is called its variant for up to `size` tokens, where `make` has one; returns how many.

    A piece that has a variant for several tokens already keeps that one.
    """
    variants: dict[str, dict[int, str]] = gm.meta.setdefault(VARIANTS, {})
    matches = 0
    for name in called_pieces(gm):
        piece: Any = gm.get_submodule(name)
        variant = None if max(variants.get(name, {}), default=0) >= size else make(piece)
        if variant is not None:
            variants.setdefault(name, {})[size] = name + suffix
            gm.add_module(name + suffix, variant)
            matches += 1
    return matches
