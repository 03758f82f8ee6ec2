"""Gives pieces the slots of their tokens, which tell padding apart: a batch input that a trace does not need."""

from __future__ import annotations

from typing import Any

from torch import fx

from mllm_compile.passes.base import CACHE_INPUT, VARIANTS
from mllm_compile.passes.match.nodes import input_node

# Inputs of the program; in graphs and pieces they are called the same, behind "token_".
_SLOTS = "slots"
_ALL_SLOTS = "all_slots"  # [N*T] int64, N ranks' one behind another


def give_slots(gm: fx.GraphModule, piece_name: str, num_ranks: int = 1) -> None:
    """Gives the piece, its variants and its callers the slots, ahead of what a piece that writes the cache has last.

    One that has them is left as it is.

    Args:
        num_ranks: of so many ranks' tokens.
    """
    variants = [piece_name, *gm.meta.get(VARIANTS, {}).get(piece_name, {}).values()]
    name = _name(num_ranks)
    if any(node.target == name for node in _placeholders(gm, piece_name)):
        return
    slots = _slots_of(gm, num_ranks)
    calls: list[Any] = list(gm.graph.find_nodes(op="call_module", target=piece_name))
    at = next((index for index, arg in enumerate(calls[0].args) if CACHE_INPUT in arg.meta), len(calls[0].args))
    for call in calls:
        call.args = (*call.args[:at], slots, *call.args[at:])
    for variant in variants:
        placeholders = _placeholders(gm, variant)
        with placeholders[0].graph.inserting_after(placeholders[at - 1]):
            placeholders[0].graph.placeholder(name).meta["val"] = slots.meta["val"]


def slots_in(graph: fx.Graph, num_ranks: int = 1) -> fx.Node:
    """The slots [num_ranks * T] int64 in a piece that has been given them."""
    slots: fx.Node = next(node for node in graph.find_nodes(op="placeholder") if node.target == _name(num_ranks))
    return slots


def _name(num_ranks: int) -> str:
    return f"token_{_SLOTS if num_ranks == 1 else _ALL_SLOTS}"


def _placeholders(gm: fx.GraphModule, piece_name: str) -> list[fx.Node]:
    piece: Any = gm.get_submodule(piece_name)
    return list(piece.graph.find_nodes(op="placeholder"))


def _slots_of(gm: fx.GraphModule, num_ranks: int) -> fx.Node:
    """The batch input with each token's slot; adds it to the graph if it has none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    input_name = _SLOTS if num_ranks == 1 else _ALL_SLOTS
    node: fx.Node
    for node in placeholders:
        if node.meta.get("input_name") == input_name and CACHE_INPUT not in node.meta:
            return node
    with gm.graph.inserting_before(placeholders[-1].next):
        slots = gm.graph.placeholder(_name(num_ranks))
    slots.meta["input_name"] = input_name
    of_tokens = input_node(gm, "input_ids").meta["val"]
    slots.meta["val"] = of_tokens.new_empty(num_ranks * of_tokens.shape[0])
    return slots
