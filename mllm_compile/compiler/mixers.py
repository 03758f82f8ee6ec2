"""Finds gated delta nets whose convolution and rule one kernel can compute: in the graph of pieces and layers.

Shape legend: T tokens, C channels, Hk key heads, Hv value heads, D key width, Dv value width.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.base import STATE_LAYERS
from mllm_compile.passes.match.layer_kinds import StateLayerKind, buffer_of, lowered_kind
from mllm_compile.passes.match.nodes import is_call, is_symbolic
from mllm_compile.runtime.state.layer import CausalConv, GatedDelta, StateLayer

_VIEWS = (operator.getitem, torch.split, torch.transpose, torch.reshape, torch.unsqueeze, "view", "squeeze")
_TAKEN = 3  # q, k and v


def find_mixers(graph: fx.GraphModule) -> dict[str, str]:
    """Gated delta rule → the convolution whose outputs are its q, k and v, in this order and nothing else, by names.

    Nobody else reads what the convolution gives: a kernel that has both need not write it.
    """
    layers: dict[str, StateLayer] = {layer.name: layer for layer in graph.meta[STATE_LAYERS]}
    nodes = [node for node in graph.graph.nodes if isinstance(lowered_kind(node), StateLayerKind)]
    of_buffers = {buffer_of(node): layers[str(node.args[2])] for node in nodes}
    found = {}
    for node in nodes:
        name = str(node.args[2])
        taken: Any = list(node.args[0])[:_TAKEN]  # type: ignore[call-overload]
        buffers = {_source(graph, operand) for operand in taken}
        buffer = buffers.pop() if len(buffers) == 1 and isinstance(layers[name].kind, GatedDelta) else None
        conv = of_buffers.get(buffer) if buffer is not None else None
        if conv is None or not isinstance(conv.kind, CausalConv) or not _lie_in_order(taken, conv.out_shape[0]):
            continue
        readers = [user for user in buffer.users if user not in nodes]  # type: ignore[union-attr]
        if len(readers) == 1 and _hands_on(graph, readers[0], buffer) == set(taken):
            found[name] = conv.name
    return found


def _source(graph: fx.GraphModule, operand: fx.Node) -> fx.Node | None:
    """The input of the piece that gives `operand` which that is a view of; None: it is none."""
    if not is_call(operand, operator.getitem) or operand.args[0].op != "call_module":  # type: ignore[union-attr]
        return None
    called: Any = operand.args[0]
    node: Any = _outputs(graph, called)[operand.args[1]]
    while is_call(node, *_VIEWS):
        node = node.args[0]
    given = dict(zip(_piece(graph, called).graph.find_nodes(op="placeholder"), called.args, strict=True))
    return given.get(node)


def _lie_in_order(taken: list[fx.Node], channels: int) -> bool:
    """True if q [T, Hk, D], k [T, Hk, D] and v [T, Hv, Dv] are the channels, one after another."""
    offset = 0
    for operand in taken:
        val = operand.meta["val"]
        _, heads, width = val.shape
        if val.storage_offset() != offset or tuple(val.stride()) != (channels, width, 1):
            return False
        offset += heads * width
    return offset == channels and taken[0].meta["val"].shape[1:] == taken[1].meta["val"].shape[1:]


def _hands_on(graph: fx.GraphModule, called: fx.Node, buffer: fx.Node | None) -> set[fx.Node] | None:
    """The values that a piece gives as views of `buffer`; None where it computes with it."""
    if called.op != "call_module":
        return None
    piece, place = _piece(graph, called), list(called.args).index(buffer)
    waiting, views = [piece.graph.find_nodes(op="placeholder")[place]], set()
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or is_symbolic(user.meta.get("val")):
                continue
            if not is_call(user, *_VIEWS):
                return None
            views.add(user)
            waiting.append(user)
    return set(_given(called, [index for index, one in enumerate(_outputs(graph, called)) if one in views]))


def _given(called: fx.Node, places: list[int]) -> Iterator[fx.Node]:
    return (user for user in called.users if user.args[1] in places)


def _piece(graph: fx.GraphModule, called: fx.Node) -> Any:
    return graph.get_submodule(str(called.target))


def _outputs(graph: fx.GraphModule, called: fx.Node) -> Any:
    return next(node for node in _piece(graph, called).graph.nodes if node.op == "output").args[0]
