"""Gives linears their weights in the few bits that they lie in memory in."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import QUANTISED_TENSORS, SMALL_WEIGHTS, GraphPass, PassResult, QuantisedTensor
from mllm_compile.passes.match.nodes import (
    LINEAR,
    drop_dead_nodes,
    identifier,
    is_call,
    is_op,
    is_weight,
    linear_operands,
    replace_by_op,
)
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, ZEROS, WeightScheme, tensor_name

_FEWEST_ROWS = 16  # of a weight that is plain in the checkpoint: a gate of some rows gains nothing


class QuantiseLinears(GraphPass):
    """Puts `mllm.quantised_linear` in the place of linears whose weights may lie in memory in few bits.

    Why: a decode step reads every weight, and memory holds them all: a half in fp8, a quarter in four bits.

    Before::

        y = linear(x, weight, bias)

    After::

        y = mllm.quantised_linear(x, weight, weight_scales, None, bias, "fp8", 128)

    `weight` is a new input of the same name, which has the values; scales and zero points get inputs beside it
    (runtime/quantised/scheme.py). All of them are told in gm.meta[QUANTISED_TENSORS].

    Requires: a canonical graph; gm.meta[SMALL_WEIGHTS] says which weights, and their schemes. A weight that anything
        else reads stays plain. Where the checkpoint is not what quantised them, so do the head's, a router's, and those
        of few rows.
    Preserves: the product with the dequantised weight.
    """

    name: ClassVar[str] = "quantise_linears"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        told: dict[str, QuantisedTensor] = gm.meta.setdefault(QUANTISED_TENSORS, {})
        small = gm.meta.get(SMALL_WEIGHTS)
        matches = 0
        if small is not None:
            kept = _choosing_linears(gm) if small.are_chosen else set()
            for node in list(gm.graph.nodes):
                if node not in kept and is_call(node, LINEAR):
                    matches += _quantise(gm, node, small.schemes, _FEWEST_ROWS if small.are_chosen else 1, told)
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _quantise(
    gm: fx.GraphModule, node: fx.Node, schemes: Any, fewest_rows: int, told: dict[str, QuantisedTensor]
) -> bool:
    source, weight, bias = linear_operands(node)
    if not is_weight(weight) or len(weight.users) != 1:
        return False
    name = weight.meta["weight_name"]
    scheme: WeightScheme | None = schemes.get(name)
    if scheme is None or weight.meta["val"].shape[0] < fewest_rows:
        return False
    inputs = {}
    columns = int(weight.meta["val"].shape[1])
    for role in scheme.roles:
        inputs[role] = _placeholder(gm, weight, scheme, role)
        told[tensor_name(name, role)] = QuantisedTensor(name, role, scheme, columns)
    operands = inputs[VALUES], inputs[SCALES], inputs.get(ZEROS), bias, scheme.kind, min(scheme.group, columns)
    replace_by_op(gm.graph, node, op("quantised_linear"), source, *operands)
    gm.graph.erase_node(weight)
    return True


def _placeholder(gm: fx.GraphModule, weight: fx.Node, scheme: WeightScheme, role: str) -> fx.Node:
    val, name = weight.meta["val"], tensor_name(weight.meta["weight_name"], role)
    with gm.graph.inserting_before(weight):
        node = gm.graph.placeholder(identifier(name))
    node.meta["weight_name"] = name
    node.meta["val"] = val.new_empty(scheme.shape(role, *map(int, val.shape)), dtype=scheme.dtype(role))
    return node


def _choosing_linears(gm: fx.GraphModule) -> set[fx.Node]:
    """Linears that logits, or the choice of experts, come from without another linear between."""
    choices: list[Any] = [node.args[1] for node in gm.graph.nodes if is_op(node, "expert_linear")]
    found, seen, wanted = set(), set(), [gm.graph.output_node(), *choices]
    while wanted:
        node = wanted.pop()
        if is_call(node, LINEAR):
            found.add(node)
        elif node not in seen:
            seen.add(node)
            wanted += node.all_input_nodes
    return found
