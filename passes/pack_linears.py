"""Puts our C++ in the place of linears on a CPU, whose weights then lie in memory in panels."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import (
    HAS_AMX,
    PACKED_WEIGHTS,
    PANELS,
    WEIGHT_SCHEMES,
    GraphPass,
    PackedPart,
    PassResult,
    PassTarget,
)
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.nodes import (
    LINEAR,
    identifier,
    is_call,
    is_op,
    is_weight,
    linear_operands,
    replace_by_op,
)
from mllm_compile.passes.match.quantised import match_quantised_linear
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.panels.layout import ROWS, VALUES_UNIT, fits_panels
from mllm_compile.runtime.quantised.scheme import WeightScheme

_DTYPES = (torch.float32, torch.bfloat16)
_SUFFIX = " in panels"  # of the name of a weight that something else reads in rows


class PackLinears(GraphPass):
    """Computes linears on a CPU from weights in panels of 16 rows (runtime/ops/panels).

    Why: a decode reads every weight, and a library reads rows at half the memory's speed; from weights in few bits it
        gains nothing (figures in docs/lab/kernels.md).

    Before::

        y = linear(x, weight, bias)
        z = mllm.quantised_linear(x, values, scales, None, bias, "int8", K)

    After::

        y = mllm.panel_linear(x, weight, bias)
        z = mllm.rounded_panel_linear(x, values, scales, None, bias, K)

    gm.meta[PANELS] has the weights that lie so. One that something else reads too, such as a tied embedding, gets a
    second input. Where gm.meta[WEIGHT_SCHEMES] does not round inputs, it is mllm.integer_panel_linear. Quantised
    linears of experts get mllm.rounded_panel_expert_linear or mllm.integer_panel_expert_linear.

    Requires: linears packed, and rows gathered: no pass behind it looks for linears. Rows a multiple of 16. A CPU with
        AMX (gm.meta[HAS_AMX]) multiplies bfloat16 faster by its library.
    Preserves: numbers but for the order of sums. Rounded inputs have eight bits, with a scale for each group of each
        token.
    """

    name: ClassVar[str] = "pack_linears"

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.device_type != "cpu":
            return "a GPU has kernels of its own"
        if not target.compiles_pieces:
            return "with compile.backend: eager pieces run as they were traced, without kernels"
        if target.num_ranks > 1 or target.num_expert_ranks > 1:
            return "weights are cut over ranks"
        return None if target.has_panels else "it takes AVX2 or AVX-512"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        panels: dict[str, int] = gm.meta.setdefault(PANELS, {})
        matches = 0
        for node in list(gm.graph.nodes):
            if is_call(node, LINEAR):
                matches += _pack_floats(gm, node, panels)
            elif match_quantised_linear(node) is not None:
                matches += _pack_integers(gm, node, panels)
            elif is_op(node, "quantised_expert_linear"):
                matches += _pack_experts(gm, node, panels)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _pack_floats(gm: fx.GraphModule, node: fx.Node, panels: dict[str, int]) -> bool:
    source, weight, bias = linear_operands(node)
    if not is_weight(weight) or weight.meta["val"].dtype not in _DTYPES:
        return False
    if gm.meta.get(HAS_AMX) and weight.meta["val"].dtype == torch.bfloat16:
        return False
    operands = [one for one in (source, weight, bias) if one is not None]
    if len({one.meta["val"].dtype for one in operands}) != 1 or not all(map(_is_plain, operands[1:])):
        return False
    rows, columns = map(int, weight.meta["val"].shape)
    if rows % ROWS or columns % 2 or not rows * columns:
        return False
    packed = weight if len(weight.users) == 1 else _second_input(gm, weight)
    replace_by_op(gm.graph, node, op("panel_linear"), source, packed, bias)
    panels[packed.meta["weight_name"]] = VALUES_UNIT
    return True


def _second_input(gm: fx.GraphModule, weight: fx.Node) -> fx.Node:
    name = weight.meta["weight_name"]
    node: fx.Node
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta.get("weight_name") == name + _SUFFIX:
            return node
    with gm.graph.inserting_before(weight):
        node = gm.graph.placeholder(identifier(name + _SUFFIX))
    node.meta["val"], node.meta["weight_name"] = weight.meta["val"].clone(), name + _SUFFIX
    packed = gm.meta.setdefault(PACKED_WEIGHTS, {})
    packed[name + _SUFFIX] = packed.get(name, (PackedPart(name, 0, int(weight.meta["val"].shape[0])),))
    return node


def _pack_integers(gm: fx.GraphModule, node: fx.Node, panels: dict[str, int]) -> bool:
    linear = match_quantised_linear(node)
    assert linear is not None, "the caller has looked"
    scheme = WeightScheme(linear.kind, linear.group)  # type: ignore[arg-type]
    if not fits_panels(scheme, *linear.shape) or not _put_in_panels(linear.source, linear.tensors, panels):
        return False
    name = f"{_computed(gm)}_panel_linear"
    replace_by_op(gm.graph, node, op(name), linear.source, *linear.tensors, linear.bias, linear.group)
    return True


def _pack_experts(gm: fx.GraphModule, node: fx.Node, panels: dict[str, int]) -> bool:
    linear = match_expert_linear(node)
    assert linear is not None, "the caller has looked"
    scheme = WeightScheme(linear.kind, linear.group)  # type: ignore[arg-type]
    tensors = linear.weight, linear.scales, linear.zeros
    if not fits_panels(scheme, *linear.shape) or not _put_in_panels(linear.x, tensors, panels):
        return False
    name = f"{_computed(gm)}_panel_expert_linear"
    how = linear.bias, linear.group, linear.of_tokens
    replace_by_op(gm.graph, node, op(name), linear.x, linear.ids, *tensors, *how)
    return True


def _computed(gm: fx.GraphModule) -> str:
    schemes = gm.meta.get(WEIGHT_SCHEMES)
    return "rounded" if schemes is not None and schemes.rounds_inputs else "integer"


def _put_in_panels(source: fx.Node, tensors: tuple[fx.Node, fx.Node, fx.Node | None], panels: dict[str, int]) -> bool:
    """Says that a weight's values, scales and third lie in panels, if they may, and if so returns True."""
    present = [one for one in tensors if one is not None]
    if source.meta["val"].dtype not in _DTYPES:
        return False
    if not all(is_weight(one) and len(one.users) == 1 and _is_plain(one) for one in present):
        return False
    for tensor in present:
        unit = VALUES_UNIT if tensor is tensors[0] else tensor.meta["val"].dtype.itemsize
        panels[tensor.meta["weight_name"]] = unit
    return True


def _is_plain(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_contiguous())
