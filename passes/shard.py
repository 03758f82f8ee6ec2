"""Cuts the model over ranks: each computes a part of the heads, the features and the vocabulary."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import RANKS, WEIGHT_CUTS, GraphPass, PassResult, PassTarget, WeightCut
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_op, is_weight, recompute_value
from mllm_compile.passes.sharding.calls import Product, name_of
from mllm_compile.passes.sharding.labels import Labelling
from mllm_compile.passes.sharding.plan import ShardPlan
from mllm_compile.passes.sharding.written_parts import join_written_parts
from mllm_compile.runtime.ops import op

_CARRIED_VIEWS = frozenset(
    ["view", "reshape", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "flatten", "getitem"]
)


class Shard(GraphPass):
    """Gives each rank its part of the weights, and puts sums over ranks where these parts meet.

    Why: a model may be larger than a GPU, and several GPUs read its weights faster.

    Before::

        q = linear(x, q_weight); k = …; v = …              # [T, H*D]
        y = linear(attention(q, k, v), o_weight, o_bias)

    After::

        # the same on each of N ranks
        q = linear(x, q_weight); k = …; v = …              # [T, H*D/N], of the rank's rows
        y = mllm.all_reduce(linear(attention(q, k, v), o_weight)) + o_bias

    The cut follows from the graph. A *cell* is an output feature of a linear whose input every rank has. Cells that
    meet elementwise, are reduced together or belong to a head and its keys are on one rank, as one *class*; classes
    that are alike are dealt out in order. Where a linear reads features of several classes, its sum is a sum over
    ranks. A row of the embedding is a cell too. With fewer heads of keys than ranks these are held several times. A
    mean over all heads is the mean of the ranks' means. Every rank computes nodes without a rule, or that do not
    divide. Sums over ranks travel through what is linear, so that two that are added are summed once.

    Requires: a canonical graph, with attention as the trace has it; `gm.meta[RANKS]`.
    Preserves: the meaning. Sums are of another order; the weights of a rank are its ranges in `gm.meta[WEIGHT_CUTS]`.
    """

    name: ClassVar[str] = "shard"
    is_required: ClassVar[bool] = True

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return "runtime.tensor_parallel_size is 1" if target.num_ranks == 1 else None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        num_ranks = gm.meta.get(RANKS, 1)
        if num_ranks == 1 or WEIGHT_CUTS in gm.meta:
            return PassResult(gm, 0, before, before)
        join_written_parts(gm.graph)
        drop_dead_nodes(gm)
        labelling, plan = _cut_of(gm, num_ranks)
        gm.meta[WEIGHT_CUTS] = plan.cuts
        if plan.cuts:
            _Rewriting(gm, labelling, plan, num_ranks).run()
            drop_dead_nodes(gm)
        return PassResult(gm, len(plan.cuts), before, len(gm.graph.nodes))


def _cut_of(gm: fx.GraphModule, num_ranks: int) -> tuple[Labelling, ShardPlan]:
    """The cut that every call can be made on; weights that cannot be cut are whole from the next try on."""
    whole: frozenset[str] = frozenset()
    means: frozenset[fx.Node] = frozenset()
    while True:
        labelling = Labelling(gm, num_ranks, whole, means)
        further = labelling.over_heads - means
        if further:
            means |= further
            continue
        if labelling.shared - whole:  # not by a mean over heads, which would be a sum over ranks
            whole |= labelling.shared
            continue
        plan = ShardPlan(gm, labelling, labelling.cells.deal(num_ranks, labelling.following))
        if not plan.refused:
            return labelling, plan
        # One that was refused as a whole already, and again: nothing is cut then.
        more = plan.refused - whole
        whole |= more or frozenset(labelling.cells.weights)


class _Rewriting:
    """Makes the graph a rank's."""

    def __init__(self, gm: fx.GraphModule, labelling: Labelling, plan: ShardPlan, num_ranks: int) -> None:
        self._graph = gm.graph
        self._labelling, self._plan, self._num_ranks = labelling, plan, num_ranks
        self._partial: set[fx.Node] = set()

    def run(self) -> None:
        changed = self._cut_placeholders()
        lookups, nodes = set(self._labelling.lookups), list(self._graph.nodes)
        for node in nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            if node in lookups and node.args[1].meta["weight_name"] in self._plan.cuts:
                self._look_up(node)
                continue
            if node in self._plan.calls:
                target, args = self._plan.calls[node]
                node.op = "call_method" if isinstance(target, str) else "call_function"
                node.target, node.args, node.kwargs = target, args, {}
                changed.add(node)
            if not changed.isdisjoint(node.all_input_nodes) or node in changed:
                old = node.meta["val"]
                recompute_value(node)
                if _differ(old, node.meta["val"]):
                    changed.add(node)
            if node in self._labelling.rows:
                self._sum(node, self._labelling.rows[node][0])
            elif node in self._labelling.means:
                self._average(node)
        for node, dim in self._plan.gathers.items():
            self._gather(node, dim)
        self._reduce()

    def _cut_placeholders(self) -> set[fx.Node]:
        changed = set()
        for node in self._graph.find_nodes(op="placeholder"):
            cuts = self._plan.cuts.get(node.meta.get("weight_name"))
            if cuts:
                node.meta["val"] = node.meta["val"].new_empty(local_shape(tuple(node.meta["val"].shape), cuts))
                changed.add(node)
        return changed

    def _look_up(self, node: fx.Node) -> None:
        """Looks token ids up in a rank's part of the vocabulary; what other ranks have is 0."""
        ids, weight, *rest = node.args
        rows = weight.meta["val"].shape[0]  # type: ignore[union-attr]
        graph, users = self._graph, list(node.users)
        with graph.inserting_before(node):
            first = call(graph, operator.mul, call(graph, op("rank_index"), ids), rows)
            places = call(graph, operator.sub, ids, first)
            is_own = call(
                graph, operator.and_, call(graph, operator.ge, places, 0), call(graph, operator.lt, places, rows)
            )
            own = call(graph, torch.where, is_own, places, 0)
            found = call(graph, node.target, own, weight, None, *rest[1:])  # type: ignore[arg-type]
            looked_up = call(graph, torch.where, call(graph, torch.unsqueeze, is_own, -1), found, 0.0)
        looked_up.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        for user in users:
            user.replace_input_with(node, looked_up)
        self._partial.add(looked_up)

    def _sum(self, node: fx.Node, product: Product) -> None:
        """Makes a product a rank's part of a sum; its bias comes behind the sum, once."""
        if product.bias is None:
            self._partial.add(node)
            return
        graph = self._graph
        if is_op(node, "expert_linear"):
            x, ids, weight, _, *how = node.args
            node.args = (x, ids, weight, None, *how)
        else:
            node.target, node.args = torch._C._nn.linear, (product.source, product.weight, None)
            if product.outputs == 1:  # addmm's
                node.target, node.args = torch.mm, (product.source, product.weight)
        node.kwargs = {}
        with graph.inserting_after(node):
            reduced = graph.call_function(op("all_reduce"), (node,))
            reduced.meta["val"] = node.meta["val"]
        bias = product.bias
        if is_op(node, "expert_linear"):
            with graph.inserting_after(reduced):
                bias = graph.call_function(torch.nn.functional.embedding, (node.args[1], product.bias))
            recompute_value(bias)
            with graph.inserting_after(bias):
                flat = graph.call_function(torch.flatten, (bias, 0, 1))
            recompute_value(flat)
            bias = flat
        with graph.inserting_after(reduced if bias is product.bias else bias):
            total = graph.call_function(operator.add, (reduced, bias))
            recompute_value(total)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not reduced)

    def _average(self, node: fx.Node) -> None:
        graph = self._graph
        with graph.inserting_after(node):
            reduced = graph.call_function(op("all_reduce"), (node,))
            reduced.meta["val"] = node.meta["val"]
        with graph.inserting_after(reduced):
            mean = graph.call_function(operator.mul, (reduced, 1 / self._num_ranks))
            mean.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not reduced)

    def _gather(self, node: fx.Node, dim: int) -> None:
        """Joins ranks' parts of an output, ahead of a conversion that would make more bytes of it."""
        reader, read = self._graph.output_node(), node
        source: Any = node.args[0]
        if name_of(node) == "to" and source.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize:
            reader, read = node, source
        with self._graph.inserting_before(reader):
            gathered = call(self._graph, op("all_gather"), read, dim, self._num_ranks)
        reader.replace_input_with(read, gathered)
        if reader is node:
            recompute_value(node)

    # Sums over ranks, as late as they may be --------------------------------------------------------------------------

    def _reduce(self) -> None:
        """Lets partial sums through what is linear, and sums them over ranks ahead of all else."""
        for node in list(self._graph.nodes):
            read = [one for one in node.all_input_nodes if one in self._partial]
            if not read:
                continue
            if node.op != "output" and _carries(node, read):
                self._partial.add(node)
                continue
            for one in read:
                with self._graph.inserting_after(one):
                    reduced = self._graph.call_function(op("all_reduce"), (one,))
                reduced.meta["val"] = one.meta["val"]
                reduced.meta["nn_module_stack"] = one.meta.get("nn_module_stack", {})
                one.replace_all_uses_with(reduced, delete_user_cb=lambda user, own=reduced: user is not own)
                self._partial.discard(one)


def local_shape(shape: tuple[int, ...], cuts: tuple[WeightCut, ...]) -> tuple[int, ...]:
    """The shape of a rank's part of a weight."""
    sizes = list(shape)
    for cut in cuts:
        sizes[cut.dim] = sum(length for _, length in cut.ranges[0])
    return tuple(sizes)


def _differ(old: Any, new: Any) -> bool:
    olds, news = (value if isinstance(value, tuple | list) else (value,) for value in (old, new))
    return any(
        isinstance(one, torch.Tensor) and one.shape != other.shape for one, other in zip(olds, news, strict=True)
    )


def _carries(node: fx.Node, read: list[fx.Node]) -> bool:
    """True if the node makes of partial sums the partial sum of what it would make of the sums, and nothing larger."""
    val = node.meta.get("val")
    if any(len(one.users) > 1 for one in read) or not isinstance(val, torch.Tensor):
        return False
    source = read[0].meta["val"]
    if val.dtype != source.dtype or _elements_a_token(val) > _elements_a_token(source):
        return False
    name, others = name_of(node), [one for one in node.all_input_nodes if one not in read]
    first = node.args[0]
    if name in ("add", "sub"):
        return node.op == "call_function" and set(node.args) == set(read) and len(read) == 2
    if name == "mul":
        return len(read) == 1 and len(node.args) == 2
    if name == "truediv":
        return read == [first] and first not in node.args[1:]
    if name == "dropout":
        return node.args[2:3] == (False,)
    if name in ("neg", "to"):
        return read == [first] and not others
    if name in _CARRIED_VIEWS:
        return read == [first]
    return name in ("sum", "mean") and read == [first] and not others


def _elements_a_token(val: torch.Tensor) -> int:
    """Elements, with 1 in place of every size of tokens except for factors before it."""
    total = 1
    for size in val.shape:
        if isinstance(size, int):
            total *= size
        else:
            expr = size.node.expr
            total *= int(expr.subs(dict.fromkeys(expr.free_symbols, 1)))
    return total


def whole_weights(gm: fx.GraphModule) -> dict[str, int]:
    """The weights that every rank has all of, with their elements."""
    cuts = gm.meta.get(WEIGHT_CUTS, {})
    return {
        node.meta["weight_name"]: node.meta["val"].numel()
        for node in gm.graph.find_nodes(op="placeholder")
        if is_weight(node) and node.meta["weight_name"] not in cuts
    }
