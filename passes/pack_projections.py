"""Merges linears that read the same input into one over concatenated weights."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

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
    recompute_views,
)
from mllm_compile.passes.match.quantised import match_quantised_linear

_MIN_ROWS = 8  # one-row gates gain nothing and their sums change order when joined (seen: 6e-6)


class PackProjections(GraphPass):
    """Packs q, k, v and gate, up into one GEMM each.

    Why: at few tokens a linear costs its weight's bytes plus a launch; one large read runs nearer the memory's speed
        than three small ones (figures in docs/lab/performance.md).

    Before::

        q = linear(x, q_weight); k = linear(x, k_weight); v = linear(x, v_weight)

    After::

        qkv = linear(x, packed_weight)          # [q rows; k rows; v rows]
        q, k, v = split(qkv, [rows of q, of k, of v], dim=-1)

    Linears of quantised weights of one scheme are packed likewise: each tensor of the weights by its rows. Where some
    linears have a bias, the others' rows of the packed one are zeros (Whisper's keys). The loader puts them there.

    Requires: weights that are placeholders with one user, of one dtype, within one stretch between attentions.
    Preserves: each output row is the same dot product; bitwise in 77 of 80 architectures, within 6e-6 in the others
        (a GEMM of another width may sum in another order).
    """

    name: ClassVar[str] = "pack_projections"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        packed = gm.meta.setdefault(PACKED_WEIGHTS, {})
        groups = _groups(gm)
        for linears in groups:
            _pack(gm, linears, packed)
        drop_dead_nodes(gm)
        return PassResult(gm, len(groups), before, len(gm.graph.nodes))


@dataclass(frozen=True)
class _Packable:
    """A linear whose weight and bias nothing else reads.

    Attributes:
        tensors: the weight's, one or several, each with a row for an output; and the bias.
        settings: what else the call says.
    """

    node: fx.Node
    source: fx.Node
    tensors: tuple[fx.Node | None, ...]
    settings: tuple[Any, ...] = ()

    @property
    def rows(self) -> int:
        return int(self.node.meta["val"].shape[-1])

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that linears packed together have in common."""
        dtypes = [None if tensor is None else tensor.meta["val"].dtype for tensor in self.tensors]
        if dtypes[-1] is None and not self.settings:  # of a plain linear the bias may be zeros
            dtypes[-1] = dtypes[0]
        return self.source, self.node.target, tuple(dtypes), self.settings


def _groups(gm: fx.GraphModule) -> list[list[_Packable]]:
    """Linears to pack, in graph order: of one input, stretch and kind."""
    groups: dict[tuple[object, ...], list[_Packable]] = defaultdict(list)
    stretch = 0
    for node in gm.graph.nodes:
        stretch += is_traced_layer(node)
        if (linear := _packable(node)) is not None:
            groups[stretch, *linear.kind].append(linear)
    return [linears for linears in groups.values() if len(linears) > 1]


def _packable(node: fx.Node) -> _Packable | None:
    quantised = match_quantised_linear(node)
    if quantised is not None:
        tensors = (*quantised.tensors, quantised.bias)
        linear = _Packable(node, quantised.source, tensors, (quantised.kind, quantised.group))
    elif is_call(node, LINEAR):
        source, *tensors_of_one = linear_operands(node)
        linear = _Packable(node, source, tuple(tensors_of_one))
    else:
        return None
    are_free = all(one is None or (is_weight(one) and len(one.users) == 1) for one in linear.tensors)
    return linear if are_free and linear.rows >= _MIN_ROWS else None


def _pack(gm: fx.GraphModule, linears: list[_Packable], packed: dict[str, tuple[PackedPart, ...]]) -> None:
    first = linears[0]
    tensors = [_packed_placeholder(gm, linears, place, packed) for place in range(len(first.tensors))]
    rows = [linear.rows for linear in linears]
    target: Callable[..., Any] = first.node.target  # type: ignore[assignment]
    with gm.graph.inserting_before(first.node):
        joined = call(gm.graph, target, first.source, *tensors, *first.settings)
        parts = call(gm.graph, torch.split, joined, rows, -1)
        joined.meta["nn_module_stack"] = parts.meta["nn_module_stack"] = first.node.meta.get("nn_module_stack", {})
        outputs = [call(gm.graph, operator.getitem, parts, index) for index in range(len(rows))]
    for linear, output in zip(linears, outputs, strict=True):
        linear.node.replace_all_uses_with(output)
        gm.graph.erase_node(linear.node)
        for old in linear.tensors:
            if old is not None:
                gm.graph.erase_node(old)
    recompute_views(outputs)  # they are parts of wider rows


def _packed_placeholder(
    gm: fx.GraphModule, linears: list[_Packable], place: int, packed: dict[str, tuple[PackedPart, ...]]
) -> fx.Node | None:
    """The joined tensor of the linears at `place`, zeros where one has none; None where none has one."""
    members = [linear.tensors[place] for linear in linears]
    given = next((member for member in members if member is not None), None)
    if given is None:
        return None
    start, parts, values, names = 0, [], [], []
    for linear, member in zip(linears, members, strict=True):
        if member is None:  # a bias
            values.append(given.meta["val"].new_zeros(linear.rows))
            names.append(f"{_name_of(linear.tensors[0]).rpartition('.')[0]}.{_name_of(given).rpartition('.')[2]}")
        else:
            values.append(member.meta["val"])
            names.append(_name_of(member))
            parts.append(PackedPart(names[-1], start, values[-1].shape[0]))
        start += values[-1].shape[0]
    packed_name = _joined_name(names)
    packed[packed_name] = tuple(parts)
    with gm.graph.inserting_before(given):
        node = gm.graph.placeholder(identifier(packed_name))
    node.meta["weight_name"] = packed_name
    node.meta["val"] = torch.cat(values)
    return node


def _name_of(weight: Any) -> str:
    name: str = weight.meta["weight_name"]
    return name


def _joined_name(names: list[str]) -> str:
    """['a.q_proj.weight', 'a.k_proj.weight'] → 'a.q_proj+k_proj.weight'."""
    split = [name.split(".") for name in names]
    same = [len({parts[i] for parts in split if i < len(parts)}) == 1 for i in range(len(split[0]))]
    if all(len(parts) == len(split[0]) for parts in split) and same.count(False) == 1:
        column = same.index(False)
        return ".".join([*split[0][:column], "+".join(p[column] for p in split), *split[0][column + 1 :]])
    return "+".join(names)
