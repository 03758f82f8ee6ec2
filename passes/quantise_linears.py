"""Gives linears their weights in the few bits that they are in memory in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import (
    QUANTISED_TENSORS,
    WEIGHT_CUTS,
    WEIGHT_SCHEMES,
    GraphPass,
    PassResult,
    QuantisedTensor,
    WeightSchemes,
)
from mllm_compile.passes.match.experts import ExpertLinear, match_expert_linear
from mllm_compile.passes.match.nodes import (
    LINEAR,
    drop_dead_nodes,
    identifier,
    is_call,
    is_weight,
    linear_operands,
    replace_by_op,
)
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import takes_weight
from mllm_compile.runtime.ops.panels.layout import fits_panels
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, WeightScheme, tensor_name, third_role

_FEWEST_ROWS = 16  # of a weight that is plain in the checkpoint: a gate of some rows gains nothing


class QuantiseLinears(GraphPass):
    """Puts `mllm.quantised_linear` in the place of linears whose weights may be in memory in few bits.

    Why: a decode step reads every weight, and memory holds them all: a half in fp8, a quarter in four bits.

    Before::

        y = linear(x, weight, bias)

    After::

        y = mllm.quantised_linear(x, weight, weight_scales, None, bias, "fp8", 128)

    and `mllm.quantised_expert_linear` in the place of experts' linears. `weight` is a new input of the same name. It
    has the values, with rows of outputs even if the model's weight is transposed. Scales and zero points get inputs
    beside it (runtime/quantised/scheme.py). All of them are told in gm.meta[QUANTISED_TENSORS].

    Requires: a canonical graph; gm.meta[WEIGHT_SCHEMES] says which weights, and their schemes. A weight that anything
        else reads stays plain, and one of experts that kernels do not take (runtime/ops/experts/shapes.py) or that
        ranks cut within what shares a scale. If the checkpoint did not quantise them, so do routers, linears of few
        rows, and the head where it is not asked for.
    Preserves: the product with the dequantised weight.
    """

    name: ClassVar[str] = "quantise_linears"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        told: dict[str, QuantisedTensor] = gm.meta.setdefault(QUANTISED_TENSORS, {})
        weight_schemes = gm.meta.get(WEIGHT_SCHEMES)
        matches = 0
        if weight_schemes is not None:
            kept = _choosing_linears(gm) if weight_schemes.are_chosen else set()
            fewest_rows = _FEWEST_ROWS if weight_schemes.are_chosen else 1
            for node in list(gm.graph.nodes):
                if is_call(node, LINEAR) and (node not in kept or _is_taken_head(node, weight_schemes)):
                    matches += _quantise(gm, node, weight_schemes, fewest_rows, told)
                elif (linear := match_expert_linear(node)) is not None and linear.scales is None:
                    matches += _quantise_experts(gm, node, linear, weight_schemes, fewest_rows, told)
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _quantise(
    gm: fx.GraphModule,
    node: fx.Node,
    weight_schemes: WeightSchemes,
    fewest_rows: int,
    told: dict[str, QuantisedTensor],
) -> bool:
    source, weight, bias = linear_operands(node)
    is_tied_head = bool(weight_schemes.head) and len(weight.users) > 1 and _is_head(node)
    scheme = _scheme(weight, weight_schemes.schemes, False, fewest_rows, may_be_shared=is_tied_head)
    if scheme is None:
        return False
    rows, columns = map(int, weight.meta["val"].shape)  # of a rank's part of a row
    if not weight_schemes.in_panels:
        scheme = scheme.of_linear(columns)
    elif not fits_panels(scheme, rows, columns) and not (
        weight_schemes.are_chosen or _is_taken_head(node, weight_schemes)
    ):
        return False  # stays as dequantised once, while it is read
    inputs = _inputs(gm, weight, scheme, False, told, weight_schemes.head if is_tied_head else "")
    group = min(scheme.group, columns)
    operands = inputs[VALUES], inputs[SCALES], inputs.get(third_role(scheme.kind)), bias, scheme.kind, group
    replace_by_op(gm.graph, node, op("quantised_linear"), source, *operands)
    if not weight.users:
        gm.graph.erase_node(weight)
    return True


def _is_taken_head(node: fx.Node, weight_schemes: WeightSchemes) -> bool:
    """True for a head that is asked for, or in int8, whose errors are a hundredth."""
    if weight_schemes.takes_head and _is_head(node):
        return True
    _, weight, _ = linear_operands(node)
    scheme = weight_schemes.schemes.get(weight.meta.get("weight_name", ""))
    return weight_schemes.in_panels and scheme is not None and scheme.kind == "int8" and _is_head(node)


def _is_head(node: fx.Node) -> bool:
    """True for a linear of the rows whose logits are wanted, which nothing but views and pointwise steps follow."""
    logits = _logits(node.graph)
    return node is logits or logits in _reached(node)


def _logits(graph: fx.Graph) -> fx.Node:
    """The output's first value; hidden states may follow it, which drafters read."""
    outputs: Any = graph.output_node().args[0]
    logits: fx.Node = outputs[0]
    return logits


def _reached(node: fx.Node) -> set[fx.Node]:
    """The nodes that a value reaches without another linear between."""
    found: set[fx.Node] = set()
    wanted = list(node.users)
    while wanted:
        user = wanted.pop()
        if user not in found and not is_call(user, LINEAR):
            found.add(user)
            wanted += user.users
    return found


def _quantise_experts(
    gm: fx.GraphModule,
    node: fx.Node,
    linear: ExpertLinear,
    weight_schemes: WeightSchemes,
    fewest_rows: int,
    told: dict[str, QuantisedTensor],
) -> bool:
    schemes = weight_schemes.transposed if linear.is_transposed else weight_schemes.schemes
    scheme = _scheme(linear.weight, schemes, linear.is_transposed, fewest_rows)
    if scheme is None or not _has_whole_groups(gm, linear, scheme):
        return False
    group = min(scheme.group, linear.shape[1])  # of a rank's part of a row
    in_panels = weight_schemes.in_panels and fits_panels(scheme, *linear.shape)
    if not in_panels and not takes_weight(scheme.kind, group, linear.shape[1]):
        return False
    inputs = _inputs(gm, linear.weight, scheme, linear.is_transposed, told)
    weight = inputs[VALUES], inputs[SCALES], inputs.get(third_role(scheme.kind)), linear.bias, scheme.kind, group
    replace_by_op(gm.graph, node, op("quantised_expert_linear"), linear.x, linear.ids, *weight, linear.of_tokens)
    gm.graph.erase_node(linear.weight)
    return True


def _has_whole_groups(gm: fx.GraphModule, linear: ExpertLinear, scheme: WeightScheme) -> bool:
    """True if a rank's part of the experts' inputs, where these are cut, is whole bytes and whole groups, or a part of
    the one group."""
    for cut in gm.meta.get(WEIGHT_CUTS, {}).get(linear.weight.meta.get("weight_name"), ()):
        if cut.as_linear(linear.is_transposed).dim < 2:
            continue
        ranges = [one for of_rank in cut.ranges for one in of_rank]
        num_inputs = max(start + length for start, length in ranges)
        in_bytes = 1 if scheme.kind in ("fp8", "int8") else 2
        unit = scheme.group if scheme.group < num_inputs else in_bytes
        if any(start % unit or length % unit for start, length in ranges):
            return False
    return True


def _scheme(
    weight: fx.Node,
    schemes: Mapping[str, WeightScheme],
    is_transposed: bool,
    fewest_rows: int,
    may_be_shared: bool = False,
) -> WeightScheme | None:
    if not is_weight(weight) or (len(weight.users) != 1 and not may_be_shared):
        return None
    is_large = weight.meta["val"].shape[-1 if is_transposed else -2] >= fewest_rows
    return schemes.get(weight.meta["weight_name"]) if is_large else None


def _inputs(
    gm: fx.GraphModule,
    weight: fx.Node,
    scheme: WeightScheme,
    is_transposed: bool,
    told: dict[str, QuantisedTensor],
    other_name: str = "",
) -> dict[str, fx.Node]:
    """Inputs of a weight's tensors, by role; they are called after `other_name`, where the weight itself stays too."""
    val, name = weight.meta["val"], weight.meta["weight_name"]
    *others, rows, columns = map(int, val.shape)
    shape = (*others, columns, rows) if is_transposed else (*others, rows, columns)
    inputs = {}
    for role in scheme.roles:
        input_name = tensor_name(other_name or name, role)
        told[input_name] = QuantisedTensor(name, role, scheme, shape, is_transposed)
        with gm.graph.inserting_before(weight):
            inputs[role] = gm.graph.placeholder(identifier(input_name))
        inputs[role].meta["weight_name"] = input_name
        inputs[role].meta["val"] = val.new_empty(scheme.shape(role, *shape), dtype=scheme.dtype(role))
    return inputs


def _choosing_linears(gm: fx.GraphModule) -> set[fx.Node]:
    """Linears that logits, or the choice of experts, come from without another linear between."""
    experts = (match_expert_linear(node) for node in gm.graph.nodes)
    choices: list[Any] = [linear.ids for linear in experts if linear is not None]
    found, seen, wanted = set(), set(), [_logits(gm.graph), *choices]
    while wanted:
        node = wanted.pop()
        if is_call(node, LINEAR):
            found.add(node)
        elif node not in seen:
            seen.add(node)
            wanted += node.all_input_nodes
    return found
