"""Gives pieces the slots of their tokens, by which padding is told: a batch input that a trace has no use for."""

from __future__ import annotations

from typing import Any

from torch import fx

from mllm_compile.passes.base import CACHE_INPUT, SMALL_FORMS
from mllm_compile.passes.match.nodes import input_node

_INPUT = "slots"  # of the program; in graphs and pieces it is called
_NAME = "token_slots"


def give_slots(gm: fx.GraphModule, piece_name: str) -> None:
    """Gives the piece, its forms and its callers the slots, ahead of what a piece that writes the cache has last.

    One that has them is left as it is.
    """
    forms = [piece_name, *gm.meta.get(SMALL_FORMS, {}).get(piece_name, {}).values()]
    if any(node.target == _NAME for node in _placeholders(gm, piece_name)):
        return
    slots = _slots_of(gm)
    calls: list[Any] = list(gm.graph.find_nodes(op="call_module", target=piece_name))
    at = next((index for index, arg in enumerate(calls[0].args) if CACHE_INPUT in arg.meta), len(calls[0].args))
    for call in calls:
        call.args = (*call.args[:at], slots, *call.args[at:])
    for form in forms:
        placeholders = _placeholders(gm, form)
        with placeholders[0].graph.inserting_after(placeholders[at - 1]):
            placeholders[0].graph.placeholder(_NAME).meta["val"] = slots.meta["val"]


def slots_in(graph: fx.Graph) -> fx.Node:
    """The slots [T] int64 in a piece that has been given them."""
    return next(node for node in graph.find_nodes(op="placeholder") if node.target == _NAME)


def _placeholders(gm: fx.GraphModule, piece_name: str) -> list[fx.Node]:
    piece: Any = gm.get_submodule(piece_name)
    return list(piece.graph.find_nodes(op="placeholder"))


def _slots_of(gm: fx.GraphModule) -> fx.Node:
    """The batch input with each token's slot; adds it to the graph if it has none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if node.meta.get("input_name") == _INPUT and CACHE_INPUT not in node.meta:
            return node
    with gm.graph.inserting_before(placeholders[-1].next):
        slots = gm.graph.placeholder(_NAME)
    slots.meta["input_name"] = _INPUT
    slots.meta["val"] = input_node(gm, "input_ids").meta["val"]
    return slots
