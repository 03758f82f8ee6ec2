"""Merges linears that read the same input into one over concatenated weights."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import PACKED_WEIGHTS, GraphPass, PackedPart, PassResult
from mllm_compile.passes.match.layer_kinds import is_traced_layer
from mllm_compile.passes.match.nodes import (
    LINEAR,
    call,
    drop_dead_nodes,
    identifier,
    is_call,
    is_weight,
    linear_operands,
)

_MIN_ROWS = 8  # one-row gates gain nothing and their sums change order when joined (seen: 6e-6)


class PackProjections(GraphPass):
    """Packs q, k, v and gate, up into one GEMM each.

    Why: at few tokens a linear costs its weight's bytes plus a launch; one large read runs nearer the memory's speed
        than three small ones (figures in docs/performance.md).

    Before::

        q = linear(x, q_weight); k = linear(x, k_weight); v = linear(x, v_weight)

    After::

        qkv = linear(x, packed_weight)          # [q rows; k rows; v rows]
        q, k, v = split(qkv, [rows of q, of k, of v], dim=-1)

    Requires: weights that are placeholders with one user, of one dtype, within one stretch between attentions.
    Preserves: each output row is the same dot product; bitwise in 77 of 80 architectures, within 6e-6 in the others
        (a GEMM of another width may sum in another order).
    """

    name: ClassVar[str] = "pack_projections"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        packed = gm.meta.setdefault(PACKED_WEIGHTS, {})
        groups = self._groups(gm)
        for linears in groups:
            self._pack(gm, linears, packed)
        drop_dead_nodes(gm)
        return PassResult(gm, len(groups), before, len(gm.graph.nodes))

    @staticmethod
    def _groups(gm: fx.GraphModule) -> list[list[fx.Node]]:
        """Linears to pack, in graph order, keyed by input, stretch, dtype and presence of a bias."""
        groups: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
        stretch = 0
        for node in gm.graph.nodes:
            stretch += is_traced_layer(node)
            if _is_packable(node):
                source, weight, bias = linear_operands(node)
                groups[source, stretch, weight.meta["val"].dtype, bias is None].append(node)
        return [linears for linears in groups.values() if len(linears) > 1]

    @staticmethod
    def _pack(gm: fx.GraphModule, linears: list[fx.Node], packed: dict[str, tuple[PackedPart, ...]]) -> None:
        source, first_weight, first_bias = linear_operands(linears[0])
        rows = [linear_operands(node)[1].meta["val"].shape[0] for node in linears]
        weight = _packed_placeholder(gm, [linear_operands(node)[1] for node in linears], first_weight, packed)
        bias = None
        if first_bias is not None:
            bias = _packed_placeholder(gm, [linear_operands(node)[2] for node in linears], first_bias, packed)
        with gm.graph.inserting_before(linears[0]):
            joined = call(gm.graph, LINEAR, source, weight, bias)
            parts = call(gm.graph, torch.split, joined, rows, -1)
            joined.meta["nn_module_stack"] = parts.meta["nn_module_stack"] = linears[0].meta.get("nn_module_stack", {})
            outputs = [call(gm.graph, operator.getitem, parts, index) for index in range(len(rows))]
        for node, output in zip(linears, outputs, strict=True):
            _, old_weight, old_bias = linear_operands(node)
            node.replace_all_uses_with(output)
            gm.graph.erase_node(node)
            for old in (old_weight, old_bias):
                if old is not None:
                    gm.graph.erase_node(old)


def _is_packable(node: fx.Node) -> bool:
    if not is_call(node, LINEAR):
        return False
    _, weight, bias = linear_operands(node)
    if not (is_weight(weight) and len(weight.users) == 1 and weight.meta["val"].shape[0] >= _MIN_ROWS):
        return False
    return bias is None or (is_weight(bias) and len(bias.users) == 1)


def _packed_placeholder(
    gm: fx.GraphModule, members: list[fx.Node | None], before: fx.Node, packed: dict[str, tuple[PackedPart, ...]]
) -> fx.Node:
    weights = [member for member in members if member is not None]
    names = [weight.meta["weight_name"] for weight in weights]
    start, parts = 0, []
    for weight, name in zip(weights, names, strict=True):
        rows = weight.meta["val"].shape[0]
        parts.append(PackedPart(name, start, rows))
        start += rows
    packed_name = _joined_name(names)
    packed[packed_name] = tuple(parts)
    with gm.graph.inserting_before(before):
        node = gm.graph.placeholder(identifier(packed_name))
    node.meta["weight_name"] = packed_name
    node.meta["val"] = torch.cat([weight.meta["val"] for weight in weights])
    return node


def _joined_name(names: list[str]) -> str:
    """['a.q_proj.weight', 'a.k_proj.weight'] → 'a.q_proj+k_proj.weight'."""
    split = [name.split(".") for name in names]
    same = [len({parts[i] for parts in split if i < len(parts)}) == 1 for i in range(len(split[0]))]
    if all(len(parts) == len(split[0]) for parts in split) and same.count(False) == 1:
        column = same.index(False)
        return ".".join([*split[0][:column], "+".join(p[column] for p in split), *split[0][column + 1 :]])
    return "+".join(names)
